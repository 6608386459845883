"""Tokens that do not fit, numbers out of range: errors eagerly, a flag under jit, no crash."""

from __future__ import annotations

import functools

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
CAPACITY = 48
LENGTHS = [10, 46, 20]


def build():
    return cache_builder.build(LENGTHS, max_length=CAPACITY, num_layers=2)


@functools.cache
def step_of(implementation, advance=True):
    """One for all tests, so that each shape is compiled once."""

    def step(cache, query, key, value, n, layer):
        (out, lse), cache = directkv_jax.decode_attention(
            query, key, value, cache, layer=layer, query_seq_lengths=n, return_residual=True,
            implementation=implementation,
        )  # fmt: skip
        return out, lse, cache.advance(n) if advance else cache

    return jax.jit(step, donate_argnums=0)


def flags(cache):
    return np.asarray(cache.overflowed).tolist()


def test_overflow_is_whole_sticky_and_alone(implementation):
    built, step = build(), step_of(implementation)
    cache, before = built.cache, cache_builder.read_tokens(built.cache)
    query, key, value = cache_builder.tokens(0, 3, 4, 4, 2, 64, "float32")
    n, layer = np.int32([4, 4, 4]), np.int32(0)
    out, _, cache = step(cache, query, key, value, n, layer)

    assert flags(cache) == [False, True, False]
    assert np.asarray(cache.lengths).tolist() == [14, 46, 24]
    oracle.check(
        out[::2], None, "float32", query[::2], built.keys[0, ::2], built.values[0, ::2], [10, 20],
        key[::2], value[::2],
    )  # fmt: skip
    keys, values = cache_builder.read_tokens(cache)
    assert cache_builder.same_bits(keys[:, 1], before[0][:, 1]), "the row writes none of its tokens"
    assert cache_builder.same_bits(keys[0, 0, 10:14], key[0])
    assert cache_builder.same_bits(values[0, 2, 20:24], value[2])

    # One token would fit now, but a row that lost tokens must not go on as if it had not.
    _, _, cache = step(cache, query, key, value, np.int32([4, 1, 4]), layer)
    assert flags(cache) == [False, True, False]
    assert np.asarray(cache.lengths).tolist() == [18, 46, 28]
    assert cache_builder.same_bits(cache_builder.read_tokens(cache)[0][:, 1], before[0][:, 1])

    cache = cache.reset(np.array([False, True, False]))
    _, _, cache = step(cache, query, key, value, n, layer)
    assert flags(cache) == [False] * 3
    assert np.asarray(cache.lengths).tolist() == [22, 4, 32]
    assert cache_builder.same_bits(cache.gather(0, 1, 0, 4)[0], key[1])


def test_the_last_slot_is_not_an_overflow(implementation):
    step = step_of(implementation)
    query, key, value = cache_builder.tokens(0, 3, 2, 4, 2, 64, "float32")
    _, _, cache = step(build().cache, query, key, value, np.int32([2, 2, 2]), np.int32(1))
    assert flags(cache) == [False] * 3
    assert np.asarray(cache.lengths).tolist() == [12, 48, 22]
    assert cache_builder.same_bits(cache.gather(1, 1, 46, 48)[0], key[1])


def test_a_row_that_overflowed_in_one_layer_does_so_in_all(implementation):
    def step(cache, key, value):
        for layer in range(2):
            cache = directkv_jax.append(
                cache, key, value, layer=layer, implementation=implementation
            )
        return cache.advance(4)

    before = cache_builder.read_tokens(build().cache)
    _, key, value = cache_builder.tokens(0, 3, 4, 2, 2, 64, "float32")
    cache = jax.jit(step, donate_argnums=0)(build().cache, key, value)
    assert flags(cache) == [False, True, False]
    assert cache_builder.same_bits(cache_builder.read_tokens(cache)[0][:, 1], before[0][:, 1])


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("lengths", n) for n in (-1, CAPACITY + 1, INT_MAX, INT_MAX - 1, INT_MIN)),
        *(("page_table", n) for n in (-1, 9, INT_MAX, INT_MIN)),
        *(("seq_lengths", n) for n in (-1, 3, INT_MAX, INT_MIN)),
    ],
)
def test_out_of_range_gives_nan_and_a_flag(implementation, field, bad):
    built, step = build(), step_of(implementation, advance=False)
    cache, n = built.cache, np.int32([2, 2, 2])
    query, key, value = cache_builder.tokens(0, 3, 2, 4, 2, 64, "float32")
    before = cache_builder.all_pages(cache)
    table = np.asarray(cache.page_table).copy()
    if field == "lengths":
        cache = cache.replace(lengths=jnp.int32([10, bad, 20]))
    elif field == "page_table":
        corrupt = table.copy()
        corrupt[1, 1] = bad
        cache = cache.replace(page_table=jnp.asarray(corrupt))
    else:
        n = np.int32([2, bad, 2])
    out, lse, cache = step(cache, query, key, value, n, np.int32(0))
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    assert flags(cache) == [False, True, False]
    oracle.check(
        out[::2], lse[::2], "float32", query[::2], built.keys[0, ::2], built.values[0, ::2],
        [10, 20], key[::2], value[::2],
    )  # fmt: skip
    after = cache_builder.all_pages(cache)
    others = np.setdiff1d(np.arange(9), table[::2])
    assert cache_builder.same_bits(after[:, others], before[:, others])


@pytest.mark.parametrize("layer", [-1, 2, INT_MAX, INT_MIN])
def test_a_traced_layer_out_of_range_gives_nan_and_a_flag(implementation, layer):
    built, step = build(), step_of(implementation)
    query, key, value = cache_builder.tokens(0, 3, 2, 4, 2, 64, "float32", [2, 2, 0])
    before = cache_builder.all_pages(built.cache)
    n = np.int32([2, 2, 0])
    out, lse, cache = step(built.cache, query, key, value, n, np.int32(layer))
    assert np.isnan(out[:2]).all()
    assert np.isnan(lse[:2]).all()
    assert (np.asarray(out[2]) == 0).all()
    assert np.isneginf(lse[2]).all()
    assert flags(cache) == [True, True, False]
    assert cache_builder.same_bits(cache_builder.all_pages(cache), before)


def test_page_ids_beyond_the_length_may_be_anything(implementation):
    """An engine fills the table as pages are needed."""
    built = cache_builder.build([10, 20], max_length=CAPACITY)
    table = np.asarray(built.cache.page_table).copy()
    table[0, 1:], table[1, 2:] = -7, INT_MAX
    cache = built.cache.replace(page_table=jnp.asarray(table))
    query, key, value = cache_builder.tokens(0, 2, 2, 4, 2, 64, "float32")
    out, cache = directkv_jax.decode_attention(
        query, key, value, cache, implementation=implementation
    )
    oracle.check(out, None, "float32", query, built.keys[0], built.values[0], [10, 20], key, value)
    assert flags(cache) == [False, False]


@pytest.mark.parametrize("n", [39, INT_MAX, -1])
def test_advance_under_jit_flags_what_does_not_fit(n):
    cache = jax.jit(lambda c, n: c.advance(n))(build().cache, np.int32([1, 1, n]))
    assert np.asarray(cache.lengths).tolist() == [11, 47, 20]
    assert flags(cache) == [False, False, True]


def test_truncate_and_take_rows_under_jit_flag_what_is_wrong():
    cache = build().cache
    cut = jax.jit(lambda c, n: c.truncate(n))(cache, np.int32([5, 47, -1]))
    assert np.asarray(cut.lengths).tolist() == [5, 46, 20]
    assert flags(cut) == [False, True, True]
    take = jax.jit(lambda c, rows: c.take_rows(rows))
    assert flags(take(cache, np.int32([0, 0, 1]))) == [True, True, False]
    assert flags(take(cache, np.int32([2, 3, -1]))) == [False, True, True]


def test_fork_under_jit_flags_rows_that_do_not_exist():
    fork = jax.jit(lambda c, rows: c.fork(rows), donate_argnums=0)
    cache = fork(build().cache, np.int32([0, 5, -1]))
    assert flags(cache) == [False, True, True]


def test_eager_calls_raise_and_the_cache_keeps_its_content(implementation):
    built = build()
    cache, before = built.cache, cache_builder.all_pages(built.cache)
    query, key, value = cache_builder.tokens(0, 3, 4, 4, 2, 64, "float32")
    options = {"implementation": implementation}
    with pytest.raises(
        ValueError, match=r"Row 1 holds 46 tokens and 4 more do not fit.*48.*larger"
    ):
        directkv_jax.decode_attention(query, key, value, cache, **options)
    with pytest.raises(ValueError, match=r"Row 1 holds 46 tokens and 4 more do not fit"):
        directkv_jax.append(cache, key, value, **options)
    with pytest.raises(ValueError, match=r"`query_seq_lengths` .* \[0, T=4\].* \[1, 5, -1\]"):
        directkv_jax.attend(
            query, cache, key, value, query_seq_lengths=np.int32([1, 5, -1]), **options
        )
    assert cache_builder.same_bits(cache_builder.all_pages(cache), before)
    directkv_jax.attend(query, cache, key, value, **options)  # reading alone needs no room


def test_eager_calls_go_on_without_the_rows_that_overflowed(implementation):
    cache = build().cache.replace(overflowed=jnp.array([False, True, False]))
    _query, key, value = cache_builder.tokens(0, 3, 1, 4, 2, 64, "float32")
    with pytest.raises(ValueError, match=r"Rows \[1\] overflowed earlier .* cache.reset"):
        directkv_jax.append(cache, key, value, implementation=implementation)
    cache = directkv_jax.append(
        cache, key, value, query_seq_lengths=np.int32([1, 0, 1]), implementation=implementation
    )
    assert np.asarray(cache.advance(np.int32([1, 0, 1])).lengths).tolist() == [11, 46, 21]


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("lengths", [10, -1, 20], r"`lengths` should be in \[0, 48\], but got \[10, -1, 20\]"),
        ("lengths", [10, 49, 20], r"`lengths` should be in \[0, 48\], but got \[10, 49, 20\]"),
        ("page_table", [[0, 1, 2], [3, 9, 5], [6, 7, 8]], r"`page_table` .* \[0, 9\).* 9"),
        ("page_table", [[0, 1, 2], [3, -1, 5], [6, 7, 8]], r"`page_table` .* \[0, 9\).* -1"),
    ],
)
def test_eager_calls_name_what_is_out_of_range(implementation, field, bad, message):
    cache = build().cache.replace(**{field: jnp.int32(bad)})
    query, key, value = cache_builder.tokens(0, 3, 2, 4, 2, 64, "float32")
    with pytest.raises(ValueError, match=message):
        directkv_jax.decode_attention(query, key, value, cache, implementation=implementation)
    with pytest.raises(ValueError, match=message):
        directkv_jax.attend(query, cache, implementation=implementation)
