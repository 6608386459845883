"""Drawn sequences of row operations against a model of the cache: lists of tokens, nothing else."""

from __future__ import annotations

import cache_builder
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")

PAGE, PAGES, LAYERS, K, H = 16, 3, 2, 2, 64
CAPACITY = PAGE * PAGES
TOKENS = 20  # more than a page in one append

# `reference` writes by the very code of `xla`.
WRITERS = pytest.mark.parametrize("implementation", ["cpu", "xla", "cuda"], indirect=True)

rows3 = st.lists(st.integers(0, 2), min_size=3, max_size=3)
operations = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(0, TOKENS), min_size=3, max_size=3)),
    st.tuples(st.just("append"), st.lists(st.integers(0, 3), min_size=3, max_size=3)),
    st.tuples(st.just("rewrite"), st.lists(st.integers(0, 3), min_size=3, max_size=3)),
    st.tuples(st.just("truncate"), st.lists(st.integers(0, CAPACITY), min_size=3, max_size=3)),
    st.tuples(st.just("take_rows"), st.permutations([0, 1, 2])),
    st.tuples(st.just("fork"), rows3),
    st.tuples(st.just("fork"), rows3),
    st.tuples(st.just("reset"), st.lists(st.booleans(), min_size=3, max_size=3)),
)


class Model:
    """Three rows of token ids and a flag each. A token's keys and values follow from its id."""

    def __init__(self):
        self.rows, self.overflowed = [[], [], []], [False] * 3

    def append(self, new):
        """Whole or not at all; `overflowed` is sticky."""
        for b, ids in enumerate(new):
            if len(self.rows[b]) + len(ids) > CAPACITY:
                self.overflowed[b] = True
            elif not self.overflowed[b]:
                self.rows[b] = self.rows[b] + ids

    def truncate(self, lengths, refused):
        """`refused`: rows that would go on in a page they share."""
        for b, n in enumerate(lengths):
            if n > len(self.rows[b]) or refused[b]:
                self.overflowed[b] = True
            else:
                self.rows[b] = self.rows[b][:n]

    def select(self, rows):
        """take_rows and fork."""
        self.rows = [list(self.rows[b]) for b in rows]
        self.overflowed = [self.overflowed[b] for b in rows]

    def reset(self, mask):
        """Empties rows."""
        self.rows = [[] if m else row for m, row in zip(mask, self.rows, strict=True)]
        self.overflowed = [o and not m for m, o in zip(mask, self.overflowed, strict=True)]


def content(ids, sign):
    """Keys (sign 1) or values (-1) of tokens: float32 `[L, n, K, H]`, exact and all different."""
    ids = np.array(ids, np.float32).reshape(1, -1, 1, 1)
    place = np.arange(K * H, dtype=np.float32).reshape(1, 1, K, H) / (K * H)
    return sign * (ids + place + 2.0**12 * np.arange(LAYERS, dtype=np.float32)[:, None, None, None])


_compiled = {}


def compiled(implementation):
    """Jitted operations, so that everything that goes wrong is a flag and not an error."""
    if implementation not in _compiled:

        def append(cache, keys, values, n, advance):
            for layer in range(LAYERS):
                cache = directkv_jax.append(
                    cache, keys[layer], values[layer], layer=layer, query_seq_lengths=n,
                    implementation=implementation,
                )  # fmt: skip
            return cache.advance(n * advance)

        _compiled[implementation] = {
            "append": jax.jit(append, donate_argnums=0),
            **{
                name: jax.jit(lambda c, x, name=name: getattr(c, name)(x), donate_argnums=0)
                for name in ("truncate", "take_rows", "fork", "reset")
            },
        }
    return _compiled[implementation]


def shared_after_truncate(cache, lengths):
    """Rows whose next token would go into a page that another row holds."""
    table, now = np.asarray(cache.page_table), np.asarray(cache.lengths)
    held = [set(table[b, : -(-now[b] // PAGE)].tolist()) for b in range(3)]
    result = []
    for b, n in enumerate(lengths):
        page = table[b, min(n // PAGE, PAGES - 1)]
        others = any(page in held[other] for other in range(3) if other != b)
        result.append(bool(n < now[b] and others))
    return result


def check(cache, model):
    """Lengths, flags, every token, and that no row can write into another."""
    lengths = [len(row) for row in model.rows]
    assert np.asarray(cache.lengths).tolist() == lengths
    assert np.asarray(cache.overflowed).tolist() == model.overflowed
    keys, values = cache_builder.read_tokens(cache)
    for b, ids in enumerate(model.rows):
        np.testing.assert_array_equal(keys[:, b, : len(ids)], content(ids, 1))
        np.testing.assert_array_equal(values[:, b, : len(ids)], content(ids, -1))
    table = np.asarray(cache.page_table)
    assert ((table >= 0) & (table < cache.num_pages)).all(), "a row lost capacity"
    for b in range(3):
        writable = set(table[b, lengths[b] // PAGE :].tolist())
        assert not writable & set(np.delete(table, b, axis=0).ravel().tolist())


@WRITERS
def test_any_sequence_of_row_operations(implementation):
    calls = compiled(implementation)

    @settings(
        max_examples=40, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(operations, min_size=4, max_size=14))
    def run(sequence):
        cache = cache_builder.build(
            [0, 0, 0], max_length=CAPACITY, num_kv_heads=K, head_dim=H, num_layers=LAYERS
        ).cache
        address, model, next_id = cache_builder.pointers(cache), Model(), 1
        for name, argument in sequence:
            if name in ("append", "rewrite"):
                new = [list(range(next_id + 100 * b, next_id + 100 * b + n))
                       for b, n in enumerate(argument)]  # fmt: skip
                next_id += 300
                keys = np.full((LAYERS, 3, TOKENS, K, H), np.nan, np.float32)
                values = keys.copy()
                for b, ids in enumerate(new):
                    keys[:, b, : len(ids)] = content(ids, 1)
                    values[:, b, : len(ids)] = content(ids, -1)
                advance = np.int32(name == "append")
                cache = calls["append"](cache, keys, values, np.int32(argument), advance)
                if advance:
                    model.append(new)
                else:  # written beyond the lengths and not counted: as if it had not been
                    for b, ids in enumerate(new):
                        model.overflowed[b] |= len(model.rows[b]) + len(ids) > CAPACITY
            elif name == "truncate":
                refused = shared_after_truncate(cache, argument)
                cache = calls[name](cache, np.int32(argument))
                model.truncate(argument, refused)
            elif name == "reset":
                cache = calls[name](cache, np.array(argument))
                model.reset(argument)
            else:
                cache = calls[name](cache, np.int32(argument))
                model.select(argument)
            check(cache, model)
            assert cache_builder.pointers(cache) == address

    run()
