"""Drawn lengths, tables, counts and data over a fixed set of shapes: a shape costs a compile.

Each example is one jitted decode step on a cache whose every unwritten slot is NaN, and is checked
whole: output and log-sum-exp against the oracle, flags, and every bit of every page. Numbers out of
range are drawn too; their rows must give NaN, a flag and no write, and nothing may crash.
"""

from __future__ import annotations

import dataclasses

import cache_builder
import jax
import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One compiled program."""

    dtype: str
    head_dim: int
    kv_heads: int
    group: int
    batch: int
    tokens: int
    page_size: int = 16
    max_pages: int = 3
    layers: int = 1
    window: int | None = None
    soft_cap: float | None = None
    spare_pages: int = 0
    placement: str = "host"

    @property
    def capacity(self) -> int:
        """Tokens of a row."""
        return self.page_size * self.max_pages

    @property
    def pages(self) -> int:
        """P."""
        return self.batch * self.max_pages + self.spare_pages


SHAPES = (
    Shape("float32", 64, 1, 1, 1, 1),
    Shape("float32", 64, 2, 4, 3, 1, spare_pages=4),
    Shape("float32", 80, 1, 3, 2, 5, window=7),
    Shape("float32", 96, 3, 1, 2, 4, layers=2),
    Shape("float32", 128, 1, 16, 2, 2, soft_cap=5.0),
    Shape("float32", 256, 1, 2, 2, 3, window=20, spare_pages=1),
    Shape("float32", 64, 2, 2, 4, 17, max_pages=4),
    Shape("float32", 64, 1, 8, 2, 1, page_size=64, max_pages=2, window=0),
    Shape("bfloat16", 64, 2, 4, 4, 1, page_size=32),
    Shape("bfloat16", 128, 2, 4, 2, 1, page_size=64, layers=2),
    Shape("bfloat16", 128, 1, 7, 3, 3, window=16),
    Shape("bfloat16", 96, 1, 5, 2, 2, soft_cap=3.0, spare_pages=3),
    Shape("bfloat16", 80, 2, 1, 2, 9, max_pages=2),
    Shape("bfloat16", 256, 1, 4, 1, 2, placement="device"),
    Shape("bfloat16", 64, 1, 3, 2, 33, max_pages=4, window=31),
    Shape("float16", 64, 2, 2, 3, 1, placement="device"),
    Shape("float16", 128, 1, 8, 2, 4, page_size=32, max_pages=2),
    Shape("float16", 96, 2, 3, 2, 2, window=5, soft_cap=2.0),
    Shape("float16", 80, 1, 12, 2, 1, layers=3),
    Shape("float16", 256, 1, 1, 3, 7, max_pages=2),
)

_programs = {}


def program(shape: Shape, implementation: str):
    """The compiled step, and the cache it runs on: one for all examples, in place."""
    key = shape, implementation
    if key not in _programs:
        cache = directkv_jax.KVCache.create(
            shape.batch, shape.capacity, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            num_layers=shape.layers, dtype=shape.dtype, page_size=shape.page_size,
            num_pages=shape.pages, placement=shape.placement,
        )  # fmt: skip

        def step(cache, query, key, value, seq_lengths, layer):
            return directkv_jax.decode_attention(
                query, key, value, cache, layer=layer, query_seq_lengths=seq_lengths,
                local_window_size=shape.window, logits_soft_cap=shape.soft_cap,
                return_residual=True, implementation=implementation,
            )  # fmt: skip

        _programs[key] = [jax.jit(step, donate_argnums=0), cache]
    return _programs[key]


@st.composite
def examples(draw, shape: Shape):
    """lengths, page table, seq_lengths, layer, data seed; some of them out of range."""
    marks = {0, 1, shape.page_size - 1, shape.page_size, shape.page_size + 1, shape.capacity}
    marks |= {shape.capacity - shape.tokens, shape.capacity - 1}
    length = st.one_of(st.sampled_from(sorted(marks)), st.integers(0, shape.capacity))
    count = st.one_of(st.just(shape.tokens), st.integers(0, shape.tokens))
    lengths = [draw(length) for _ in range(shape.batch)]
    counts = [draw(count) for _ in range(shape.batch)]
    seed = draw(st.integers(0, 2**20))
    table = np.random.default_rng(seed).permutation(shape.pages)
    table = table[: shape.batch * shape.max_pages].reshape(shape.batch, shape.max_pages)
    layer = draw(st.integers(0, shape.layers - 1))
    spoiled = draw(st.sampled_from(["nothing", "nothing", "lengths", "table", "counts", "layer"]))
    row = draw(st.integers(0, shape.batch - 1))
    if spoiled == "lengths":
        lengths[row] = draw(st.sampled_from([-1, shape.capacity + 1, INT_MAX, INT_MIN]))
    elif spoiled == "table":
        bad = st.sampled_from([-1, shape.pages, INT_MAX, INT_MIN])
        table[row, draw(st.integers(0, shape.max_pages - 1))] = draw(bad)
    elif spoiled == "counts":
        counts[row] = draw(st.sampled_from([-1, shape.tokens + 1, INT_MAX, INT_MIN]))
    elif spoiled == "layer":
        layer = draw(st.sampled_from([-1, shape.layers, INT_MAX, INT_MIN]))
    return lengths, table.astype(np.int32), counts, layer, seed


def judge(shape: Shape, length, pages, count, layer) -> tuple[bool, bool]:
    """(the row can be read, the row can be written), from what the documentation promises."""
    sane = 0 <= length <= shape.capacity and 0 <= count <= shape.tokens
    sane = sane and 0 <= layer < shape.layers
    if count == 0 or not sane:
        return count == 0, False
    first = 0 if shape.window is None else max(0, length - shape.window)
    size = shape.page_size

    def in_range(begin, end):
        return all(0 <= p < shape.pages for p in pages[begin // size : -(-end // size)])

    readable = first >= length or in_range(first, length)
    return readable, length + count <= shape.capacity and in_range(0, length + count)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.dtype}-H{s.head_dim}-T{s.tokens}")
def test_a_step(implementation, shape):
    @settings(
        max_examples=12, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(examples(shape))
    def run(example):
        check_step(shape, implementation, *example)

    run()


def check_step(shape, implementation, lengths, table, counts, layer, seed):
    """One example."""
    step, cache = state = program(shape, implementation)
    rng = np.random.default_rng(seed)
    size = (shape.layers, shape.batch, shape.capacity, shape.kv_heads, shape.head_dim)
    keys, values = (cache_builder.random(rng, size, shape.dtype) for _ in range(2))
    valid_counts = np.clip(counts, 0, shape.tokens)
    beyond = np.arange(shape.capacity)[None, :] >= np.array(lengths)[:, None]
    keys[:, beyond], values[:, beyond] = np.nan, np.nan
    pages = np.full((shape.layers, shape.pages, *cache.pages.shape[2:]), np.nan, keys.dtype)
    held = (table >= 0) & (table < shape.pages)
    rows = cache_builder.to_pages(cache.layout, keys, values)
    pages[:, table[held]] = rows[:, held.ravel()]
    query, key, value = cache_builder.tokens(
        seed, shape.batch, shape.tokens, shape.kv_heads * shape.group, shape.kv_heads,
        shape.head_dim, shape.dtype, valid_counts,
    )  # fmt: skip

    cache = cache_builder.set_pages(cache, pages).replace(
        page_table=jax.device_put(table, cache.page_table.sharding),
        lengths=jax.device_put(np.int32(lengths), cache.lengths.sharding),
        overflowed=jax.device_put(np.zeros(shape.batch, bool), cache.overflowed.sharding),
    )
    (out, lse), cache = step(cache, query, key, value, np.int32(counts), np.int32(layer))
    state[1] = cache
    out, lse = np.asarray(out), np.asarray(lse)

    verdicts = [judge(shape, *x, layer) for x in zip(lengths, table, counts, strict=True)]
    expected = cache.layout.unpack(pages.copy())
    for b, (readable, writable) in enumerate(verdicts):
        if not readable:
            wrong_count = not 0 <= counts[b] <= shape.tokens
            valid = shape.tokens if wrong_count else counts[b]
            assert np.isnan(out[b, :valid]).all()
            assert np.isnan(lse[b, :valid]).all()
            assert (out[b, valid:] == 0).all()
            assert np.isneginf(lse[b, valid:]).all()
        if writable:
            for t in range(counts[b]):
                page, slot = divmod(lengths[b] + t, shape.page_size)
                expected[layer, table[b, page], :, 0, slot] = key[b, t]
                expected[layer, table[b, page], :, 1, slot] = value[b, t]
    assert np.asarray(cache.overflowed).tolist() == [
        n != 0 and not writable for n, (_, writable) in zip(counts, verdicts, strict=True)
    ]
    assert np.asarray(cache.lengths).tolist() == lengths
    assert cache_builder.same_bits(cache_builder.all_pages(cache), cache.layout.pack(expected)), (
        "a page holds something else than it should"
    )
    good = [b for b, (readable, _) in enumerate(verdicts) if readable]
    if good:
        at = max(0, min(layer, shape.layers - 1))
        oracle.check(
            out[good], lse[good], shape.dtype, query[good], keys[at][good], values[at][good],
            np.clip(lengths, 0, shape.capacity)[good], key[good], value[good],
            seq_lengths=valid_counts[good], soft_cap=shape.soft_cap, window=shape.window,
        )  # fmt: skip
