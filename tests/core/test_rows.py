"""Row operations: advance, truncate, take_rows, fork, reset; other rows keep every bit."""

from __future__ import annotations

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")

PAGE = 16
LENGTHS = [5, 16, 33, 0]  # an open page, a page exactly, two pages and an open one, nothing


def build(lengths=LENGTHS, **options):
    return cache_builder.build(lengths, max_length=3 * PAGE, num_layers=2, **options)


def write(cache, seed, count=1, rows=None):
    """Appends `count` tokens to every row (or to those of a mask) of both layers, and advances."""
    n = np.full(cache.batch, count, np.int32) if rows is None else np.int32(rows) * count
    tokens = []
    for layer in range(2):
        _, key, value = cache_builder.tokens(seed + layer, cache.batch, count, 2, 2, 64, "float32")
        cache = directkv_jax.append(cache, key, value, layer=layer, query_seq_lengths=n)
        tokens.append((key, value))
    return cache.advance(n), tokens


def contents(cache):
    """Keys of layer 0 and values of layer 1 of each row, as bytes."""
    keys, values = cache_builder.read_tokens(cache)
    lengths = np.asarray(cache.lengths)
    return [(keys[0, b, :n].tobytes(), values[1, b, :n].tobytes()) for b, n in enumerate(lengths)]


def writable_pages_are_private(cache) -> bool:
    """No page that a row can still write is in the part another row can reach."""
    table, lengths = np.asarray(cache.page_table), np.asarray(cache.lengths)
    for b in range(cache.batch):
        writable = {p for p in table[b, lengths[b] // PAGE :] if 0 <= p < cache.num_pages}
        others = set(np.delete(table, b, axis=0).ravel().tolist())
        if writable & others:
            return False
    return True


def test_advance_takes_a_number_or_one_for_each_row():
    cache = build().cache
    assert np.asarray(cache.advance(3).lengths).tolist() == [8, 19, 36, 3]
    assert np.asarray(cache.advance(np.int32([0, 1, 15, 48])).lengths).tolist() == [5, 17, 48, 48]
    assert np.asarray(jax.jit(lambda c: c.advance(2).lengths)(cache)).tolist() == [7, 18, 35, 2]


def test_truncate_then_append_goes_on_from_there():
    built = build()
    cache, tokens = write(built.cache.truncate(np.int32([2, 16, 20, 0])), seed=7)
    assert np.asarray(cache.lengths).tolist() == [3, 17, 21, 1]
    for b, length in enumerate([2, 16, 20, 0]):
        for layer in range(2):
            k, v = cache.gather(layer, b, 0, length + 1)
            key, value = tokens[layer]
            assert cache_builder.same_bits(k[:-1], built.keys[layer, b, :length])
            assert cache_builder.same_bits(k[-1], key[b, 0])
            assert cache_builder.same_bits(v[-1], value[b, 0])


def test_truncate_takes_one_length_for_all():
    cache = build([5, 16, 33, 7]).cache.truncate(4)
    assert np.asarray(cache.lengths).tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("rows", [[2, 0, 3, 1], [1, 2], [3]])
def test_take_rows_moves_no_data(rows):
    built = build()
    before, address = contents(built.cache), cache_builder.pointers(built.cache)
    cache = built.cache.take_rows(np.int32(rows))
    assert cache_builder.pointers(cache) == address
    assert contents(cache) == [before[r] for r in rows]
    assert cache.batch == len(rows)


@pytest.mark.parametrize("rows", [[2, 2, 2, 2], [0, 0, 2, 1], [3, 2, 1, 0], [1, 1], [2]])
def test_forks_diverge_without_disturbing_each_other(rows):
    built = build()
    before = contents(built.cache)
    address = cache_builder.pointers(built.cache)
    cache = built.cache.fork(np.int32(rows))
    assert cache_builder.pointers(cache) == address, "the open pages are copied in place"
    assert contents(cache) == [before[r] for r in rows]
    assert writable_pages_are_private(cache)
    expected = contents(cache)
    for step in range(3):
        for b in range(len(rows)):  # one row at a time: every other row keeps every bit
            cache, _ = write(cache, seed=10 * step + b, rows=np.arange(len(rows)) == b)
            now = contents(cache)
            assert [x for i, x in enumerate(now) if i != b] == [
                x for i, x in enumerate(expected) if i != b
            ]
            assert now[b][0][: len(expected[b][0])] == expected[b][0]
            expected = now


def test_fork_under_jit_is_in_place(implementation):
    built = build()
    before, address = contents(built.cache), cache_builder.pointers(built.cache)
    fork = jax.jit(lambda cache, rows: cache.fork(rows), donate_argnums=0)
    cache = fork(built.cache, jnp.int32([2, 0, 2, 0]))
    assert cache_builder.pointers(cache) == address
    assert contents(cache) == [before[r] for r in [2, 0, 2, 0]]
    assert writable_pages_are_private(cache)


def test_a_fork_keeps_its_capacity_in_the_default_pool():
    cache = build().cache.fork(np.int32([2, 2, 2, 2]))
    cache, _ = write(cache, seed=0, count=3 * PAGE - 33)
    assert np.asarray(cache.lengths).tolist() == [48] * 4
    assert not np.asarray(cache.overflowed).any()


def test_a_fork_may_have_more_rows_than_its_parent():
    cache = build([20, 5]).cache  # 6 pages; the open pages of 5 rows and one full page fit
    parents = contents(cache)
    rows = np.int32([0, 0, 0, 1, 1])
    cache = cache.fork(rows)
    assert contents(cache) == [parents[r] for r in rows]
    with pytest.raises(ValueError, match=r"7 pages are needed .* pool has 6.* larger num_pages"):
        cache.fork(np.int32([0, 0, 0, 1, 1, 1]))
    assert contents(cache) == [parents[r] for r in rows], "the cache keeps its content"


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # other sizes
def test_a_fork_without_a_page_for_its_last_tokens_is_flagged_under_jit():
    cache = build([20]).cache  # 3 pages
    forked = jax.jit(lambda c: c.fork(jnp.int32([0] * 4)), donate_argnums=0)(cache)
    assert forked.overflowed.tolist() == [False, False, True, True]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("rows", [[0, 1, 1], [1, 0, 1], [1, 1, 0]])
@pytest.mark.parametrize(("length", "table"), [(0, [[2, 2], [0, 2]]), (16, [[0, 3], [1, 3]])])
def test_a_row_without_an_open_page_takes_none_from_others(length, table, rows, jitted):
    """The pool has a page for each row that needs one, and no more."""
    cache = directkv_jax.KVCache.create(
        2, 2 * PAGE, num_kv_heads=1, head_dim=8, dtype=jnp.float32, page_size=PAGE,
        num_pages=np.max(table),
    ).replace(page_table=jnp.int32(table))  # fmt: skip
    key, lengths = jnp.ones((2, PAGE, 1, 8)), np.int32([length, 5])
    cache = directkv_jax.append(cache, key, key, query_seq_lengths=lengths).advance(lengths)

    def fork(cache):
        return cache.fork(np.int32(rows))

    forked = jax.jit(fork, donate_argnums=0)(cache) if jitted else fork(cache)
    assert not forked.overflowed.any()
    assert forked.lengths.tolist() == lengths[rows].tolist()
    for row, held in enumerate(lengths[rows]):
        assert (forked.gather(0, row, 0, held)[0] == 1).all()


def test_lists_of_traced_integers():
    cache = build([3, 5]).cache
    call = jax.jit(lambda c, a, b: c.advance([a, b]).take_rows([b - 1, a - 1]).lengths)
    assert call(cache, 1, 2).tolist() == [7, 4]
    with pytest.raises(TypeError, match="`n` should hold integers"):
        cache.advance(None)


def test_forks_of_forks():
    cache = build().cache
    for step, rows in enumerate(([2, 2, 0, 1], [0, 0, 1, 2], [1, 1, 1, 1], [3, 2, 1, 0])):
        before = contents(cache)
        cache = cache.fork(np.int32(rows))
        assert contents(cache) == [before[r] for r in rows]
        assert writable_pages_are_private(cache)
        cache, _ = write(cache, seed=step)


def test_truncate_of_a_fork_stays_out_of_the_common_part():
    cache = build().cache.fork(np.int32([2, 2, 0, 1]))  # rows 0 and 1 share two pages
    with pytest.raises(ValueError, match=r"Rows \[0\] .* share .* Truncate before the fork"):
        cache.truncate(np.int32([20, 33, 5, 16]))
    assert np.asarray(cache.truncate(np.int32([32, 33, 5, 16])).lengths)[0] == 32
    shorter = jax.jit(lambda c, n: c.truncate(n))(cache, np.int32([20, 33, 5, 16]))
    assert np.asarray(shorter.lengths).tolist() == [33, 33, 5, 16]
    assert np.asarray(shorter.overflowed).tolist() == [True, False, False, False]


def test_reset_empties_rows_and_clears_their_flag():
    cache = build().cache.replace(overflowed=jnp.array([True, False, True, False]))
    assert np.asarray(cache.reset().lengths).tolist() == [0] * 4
    assert not np.asarray(cache.reset().overflowed).any()
    some = cache.reset(np.array([True, True, False, False]))
    assert np.asarray(some.lengths).tolist() == [0, 0, 33, 0]
    assert np.asarray(some.overflowed).tolist() == [False, False, True, False]


@pytest.mark.parametrize("jitted", [False, True])
def test_a_reset_row_does_not_write_into_its_forked_sibling(jitted):
    cache = build().cache.fork(np.int32([2, 2, 0, 2]))
    mask = np.array([True, False, False, True])
    reset = (
        jax.jit(lambda c, m: c.reset(m), donate_argnums=0) if jitted else (lambda c, m: c.reset(m))
    )
    cache = reset(cache, mask)
    kept = contents(cache)
    assert writable_pages_are_private(cache)
    cache, _ = write(cache, seed=3, count=3 * PAGE, rows=mask)
    assert np.asarray(cache.lengths).tolist() == [48, 33, 5, 48]
    now = contents(cache)
    assert now[1] == kept[1]
    assert now[2] == kept[2]
    assert now[0] != now[3]


def test_all_rows_are_apart_after_a_full_reset():
    cache = build().cache.fork(np.int32([2, 2, 2, 2])).reset()
    assert writable_pages_are_private(cache)
    cache, tokens = write(cache, seed=4, count=3 * PAGE)
    for b in range(4):
        k, _ = cache.gather(0, b, 0, 3 * PAGE)
        assert cache_builder.same_bits(k, tokens[0][0][b])


def test_reset_of_rows_that_share_nothing_keeps_their_pages():
    cache = build().cache
    table = np.asarray(cache.page_table)
    assert (np.asarray(cache.reset().page_table) == table).all()


def test_the_flag_travels_with_the_row():
    cache = build().cache.replace(overflowed=jnp.array([False, True, False, False]))
    assert np.asarray(cache.take_rows(np.int32([1, 0])).overflowed).tolist() == [True, False]
    forked = jax.jit(lambda c, r: c.fork(r), donate_argnums=0)(cache, jnp.int32([1, 1, 0, 2]))
    assert np.asarray(forked.overflowed).tolist() == [True, True, False, False]
