"""Caches that keep a window: the results are those of a cache that keeps all, bit by bit."""

from __future__ import annotations

import functools

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")

PAGE, CAPACITY, K, G, H = 16, 320, 2, 2, 64
SIZES = (1, 130)  # tokens of a step, of which any part is valid: as decoding, and beyond the ring

steps = st.lists(
    st.tuples(
        st.sampled_from(SIZES),
        st.lists(st.floats(0, 1), min_size=2, max_size=2),  # which part of them is valid
        st.lists(st.integers(0, 5), min_size=2, max_size=2),  # taken back afterwards
    ),
    min_size=1,
    max_size=5,
)


def create(window: int | None, placement="host", **options):
    if window is None:
        options.pop("rollback", None)
    return directkv_jax.KVCache.create(
        2, CAPACITY, num_kv_heads=K, head_dim=H, num_layers=2, dtype=jnp.float32, page_size=PAGE,
        placement=placement, window=window, **options,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("window", "implementation"), donate_argnames="cache")
def step(cache, query, key, value, valid, *, window, implementation):
    out, cache = directkv_jax.decode_attention(
        query, key, value, cache, layer=1, query_seq_lengths=valid, implementation=implementation,
        local_window_size=(window - 1, 0),
    )  # fmt: skip
    return out, cache.advance(valid)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=steps, window=st.sampled_from((1, 45)))
def test_a_window_is_all_that_is_needed(implementation, steps, window):
    run(steps, window, implementation, "device")


def test_a_window_in_host_memory(implementation):
    run([(50, [1.0, 0.5], [0, 5]), (1, [1.0, 1.0], [0, 0])], 45, implementation, "host")


def run(steps, window, implementation, placement):
    """Each step on a cache that keeps all and on one that keeps the window."""
    whole, kept = create(None, placement), create(window, placement, rollback=5)
    assert kept.nbytes < whole.nbytes
    for seed, (tokens, parts, back) in enumerate(steps):
        if np.asarray(whole.lengths).max() + tokens > CAPACITY:
            continue
        arrays = cache_builder.tokens(seed, 2, tokens, K * G, K, H, "float32")
        valid = np.int32([round(part * tokens) for part in parts])
        options = {"window": window, "implementation": implementation}
        expected, whole = step(whole, *arrays, valid, **options)
        got, kept = step(kept, *arrays, valid, **options)
        for b, n in enumerate(valid):
            assert cache_builder.same_bits(np.asarray(expected)[b, :n], np.asarray(got)[b, :n])
        back = np.minimum(back, valid)  # never beyond this step, nor further than `rollback`
        whole, kept = (cache.truncate(cache.lengths - back) for cache in (whole, kept))
        assert np.asarray(whole.lengths).tolist() == np.asarray(kept.lengths).tolist()
        assert not np.asarray(kept.overflowed).any()
    whole.delete()
    kept.delete()


def test_the_ring_holds_the_window_and_no_more():
    cache = create(33)  # 32 tokens before a query
    assert (cache.kept_length, cache.num_pages) == (32, 4)
    assert np.asarray(cache.page_table)[1, :5].tolist() == [2, 3, 2, 3, 2]
    assert create(33, rollback=1).kept_length == 48
    assert create(100_000).kept_length == CAPACITY  # no larger than a whole row


def test_fewer_rows_have_rings_no_longer(tmp_path):
    """The pages of the rows that are gone are nobody's."""
    cache = create(33).take_rows(np.int32([1]))
    assert cache.kept_length == 32
    _, key, value = cache_builder.tokens(0, 1, 120, K * G, K, H, "float32")
    for start in range(0, 120, 40):
        part = slice(start, start + 40)
        cache = directkv_jax.append(cache, key[:, part], value[:, part], layer=1).advance(40)
    for got, expected in zip(cache.gather(1, 0, 100, 120), (key, value), strict=True):
        assert cache_builder.same_bits(got, expected[0, 100:120])
    with pytest.raises(ValueError, match="those from 68 on are gone"):
        cache.gather(1, 0, 68, 120)
    with pytest.raises(ValueError, match="more than 0 tokens"):
        cache.truncate(90)
    assert jax.jit(lambda c: c.truncate(90))(cache).overflowed.tolist() == [True]
    cache.save(tmp_path / "cache")
    loaded = directkv_jax.KVCache.load(tmp_path / "cache")
    for got, expected in zip(loaded.gather(1, 0, 100, 120), (key, value), strict=True):
        assert cache_builder.same_bits(got, expected[0, 100:120])


def test_a_query_must_not_look_beyond_the_window():
    cache = create(16)
    query, key, value = cache_builder.tokens(0, 2, 1, K * G, K, H, "float32")
    for window in (None, (16, 0)):
        with pytest.raises(ValueError, match=r"keeps a window of 16 tokens.*\(15, 0\)"):
            directkv_jax.attend(query, cache, key, value, local_window_size=window)
    directkv_jax.attend(query, cache, key, value, local_window_size=(15, 0))


def test_truncate_goes_back_as_far_as_was_asked_for():
    cache = create(16, rollback=3).advance(100)
    back = cache.truncate(97)
    assert np.asarray(back.lengths).tolist() == [97, 97]
    # Also step by step: what counts is the longest that a row has been.
    with pytest.raises(ValueError, match=r"more than 3 tokens from the \[100, 100\]"):
        back.truncate(96)
    under_jit = jax.jit(lambda c: c.truncate(jnp.int32([97, 96])))(cache)
    assert np.asarray(under_jit.lengths).tolist() == [97, 100]
    assert np.asarray(under_jit.overflowed).tolist() == [False, True]
    assert np.asarray(cache.reset().advance(5).truncate(2).lengths).tolist() == [2, 2]


def test_rows_are_reordered_and_emptied_with_their_rings():
    cache = create(16, rollback=3).advance(np.int32([100, 7]))
    cache = cache.take_rows(jnp.int32([1, 0]))
    assert np.asarray(cache.written).tolist() == [7, 100]
    table = np.asarray(cache.page_table)
    cache = cache.reset(jnp.array([False, True]))
    assert np.asarray(cache.written).tolist() == [7, 0]
    assert np.asarray(cache.page_table).tolist() == table.tolist()  # pages repeat, and stay


def test_what_a_ring_cannot_do_is_refused():
    cache = create(16)
    with pytest.raises(NotImplementedError, match="keeps a window"):
        cache.fork(jnp.int32([0, 0]))
    with pytest.raises(ValueError, match="those from 3 on are gone"):
        cache.advance(100).gather(0, 0, 3, 100)
    for options, message in {
        "window": ({"window": 0}, "`window` should be a positive int"),
        "rollback": ({"window": 8, "rollback": -1}, "`rollback` should be an int of 0 or more"),
        "both": ({"window": 8, "num_pages": 9}, "exclude each other"),
        "alone": ({"rollback": 2}, "`rollback` is of a cache with a `window`"),
    }.values():
        with pytest.raises(ValueError, match=message):
            directkv_jax.KVCache.create(1, 64, num_kv_heads=1, head_dim=64, **options)
