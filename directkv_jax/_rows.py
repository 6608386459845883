"""What happens to the rows of a cache: admission, lengths, reordering, forks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax import _checks
from directkv_jax._pages import read_pages, write_pages
from directkv_jax._platform import any_tracer

if TYPE_CHECKING:
    from directkv_jax.cache import KVCache


def admit(cache: KVCache, seq_lengths, tokens: int):
    """(tokens each row accepts: all or none; `overflowed` after that)."""
    end = cache.lengths + seq_lengths
    ok = (cache.lengths >= 0) & (seq_lengths >= 0) & (seq_lengths <= tokens)
    ok &= (cache.lengths <= cache.max_length) & (end <= cache.max_length)  # the sum may wrap
    start = jnp.arange(cache.max_pages, dtype=jnp.int32)[None, :] * cache.page_size
    in_range = (cache.page_table >= 0) & (cache.page_table < cache.pages_per_shard)
    ok &= jnp.all(in_range | (start >= end[:, None]), axis=1)
    fits = ok & ~cache.overflowed
    return jnp.where(fits, seq_lengths, 0), cache.overflowed | (~ok & (seq_lengths != 0))


def kept_tokens(cache: KVCache, key, value, admitted):
    """Of an append, what later queries can see: with a window, the last tokens of each row.

    Returns:
      (key, value: `[B, T', K, H]`, the lengths they are written at, how many are valid).
    """
    kept = cache.kept_length
    if cache.window is None or key.shape[1] <= kept:
        return key, value, cache.lengths, admitted
    skipped = jnp.maximum(admitted - kept, 0)
    last = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, kept))
    key, value = (last(x, skipped) for x in (key, value))
    return key, value, cache.lengths + skipped, admitted - skipped


def advance(cache: KVCache, n) -> KVCache:
    """`lengths + n` for rows that have not overflowed."""
    end = cache.lengths + n
    if not any_tracer(cache, n):
        values = np.asarray(cache.lengths, np.int64) + np.asarray(n)
        values = values[~np.asarray(cache.overflowed)]
        if (np.asarray(n) < 0).any():
            raise ValueError(f"`n` should not be negative, but got {np.asarray(n).tolist()}.")
        if (values > cache.max_length).any():
            raise ValueError(
                f"A row would hold {values.max()} tokens, but the cache has room for "
                f"{cache.max_length} per row."
            )
    ok = (n >= 0) & (n <= cache.max_length) & (end <= cache.max_length)  # the sum may wrap
    lengths = jnp.where(ok & ~cache.overflowed, end, cache.lengths)
    written = None if cache.written is None else jnp.maximum(cache.written, lengths)
    return cache.replace(lengths=lengths, overflowed=cache.overflowed | ~ok, written=written)


def truncate(cache: KVCache, lengths) -> KVCache:
    """Shorter rows; those asked for what they do not hold, or share, keep their length."""
    ok = (lengths >= 0) & (lengths <= cache.lengths)
    shared = _open_page_is_shared(cache, lengths)
    lost = _is_overwritten(cache, lengths)
    if not any_tracer(cache, lengths):
        if not np.asarray(ok).all():
            raise ValueError(
                "`lengths` should be in [0, present lengths "
                f"{np.asarray(cache.lengths).tolist()}], but got {np.asarray(lengths).tolist()}."
            )
        if (rows := np.flatnonzero(np.asarray(shared))).size:
            raise ValueError(
                f"Rows {rows.tolist()} would go on in a page that they share with a row they were "
                "forked from. Truncate before the fork, or not into the common part."
            )
        if (rows := np.flatnonzero(np.asarray(lost))).size:
            raise ValueError(
                f"Rows {rows.tolist()} would go back more than {cache.rollback} tokens from the "
                f"{np.asarray(cache.written)[rows].tolist()} they have held: their window is "
                "overwritten. Create the cache with a larger `rollback`."
            )
    ok &= ~shared & ~lost
    return cache.replace(
        lengths=jnp.where(ok, lengths, cache.lengths), overflowed=cache.overflowed | ~ok
    )


def _is_overwritten(cache: KVCache, lengths):
    """bool `[B]`: the window before a shortened row is no longer in its ring."""
    if cache.written is None or cache.kept_length == cache.max_length:
        return jnp.zeros_like(cache.overflowed)
    return (lengths < cache.lengths) & (lengths < cache.written - cache.rollback)


def _open_page_is_shared(cache: KVCache, lengths):
    """bool `[B]`: the page a shortened row would write next is in use by another row."""
    if cache.batch_axis is not None:  # `fork` is refused there, so nothing is shared
        return jnp.zeros_like(cache.overflowed)
    page = jnp.clip(lengths // cache.page_size, 0, cache.max_pages - 1)
    held = jnp.arange(cache.max_pages)[None, :] * cache.page_size < cache.lengths[:, None]
    mine = jnp.take_along_axis(cache.page_table, page[:, None], axis=1)  # [B, 1]
    in_row = ((cache.page_table[None] == mine[:, :, None]) & held[None]).any(-1)  # [B, other row]
    others = in_row & ~jnp.eye(cache.batch, dtype=bool)
    return (lengths < cache.lengths) & others.any(-1)


def take_rows(cache: KVCache, rows) -> KVCache:
    """Reorders or selects rows; a repeated or absent row is an error, or flagged under jit."""
    rows = _check_row_ids(cache, rows, "take_rows")
    repeated = (rows[:, None] == rows[None, :]).sum(1) > 1
    absent = (rows < 0) | (rows >= cache.batch)
    if not any_tracer(cache, rows) and np.asarray(repeated).any():
        raise ValueError(
            f"`rows` should not repeat, but got {np.asarray(rows).tolist()}: two rows would write "
            "the same page. Use `fork` to copy rows."
        )
    picked = jnp.clip(rows, 0, cache.batch - 1)
    return cache.replace(
        page_table=cache.page_table[picked],
        lengths=cache.lengths[picked],
        overflowed=cache.overflowed[picked] | repeated | absent,
        written=None if cache.written is None else cache.written[picked],
    )


def reset(cache: KVCache, mask) -> KVCache:
    """Empties the rows of a bool mask `[B]`.

    A page that such a row shares with another, after `fork`, is exchanged for one nobody holds, or
    the row would go on writing into the other. Without sharing the page table stays as it is.
    """
    table, num_pages = cache.page_table, cache.num_pages
    if cache.batch_axis is None and cache.window is None:  # what `fork` refuses shares nothing
        valid = (table >= 0) & (table < num_pages)
        # The owner of a page is its first holder, rows that stay before rows that are emptied.
        order = (
            jnp.arange(table.size).reshape(table.shape) + jnp.where(mask, table.size, 0)[:, None]
        )
        slot = jnp.where(valid, table, num_pages)
        owner = jnp.full((num_pages,), 2 * table.size).at[slot].min(order, mode="drop")
        held_twice = valid & mask[:, None] & (jnp.take(owner, slot, mode="clip") != order)
        free = _free_pages(cache, valid)
        rank = jnp.cumsum(held_twice.ravel()).reshape(table.shape) - 1
        fresh = jnp.take(free, rank, mode="fill", fill_value=num_pages)
        table = jnp.where(held_twice, fresh, table).astype(jnp.int32)
    return cache.replace(
        page_table=table,
        lengths=jnp.where(mask, 0, cache.lengths),
        overflowed=cache.overflowed & ~mask,
        written=None if cache.written is None else jnp.where(mask, 0, cache.written),
    )


def fork(cache: KVCache, rows) -> KVCache:
    """Independent copies of rows: full pages shared, the open page copied."""
    _checks.check_cache(cache)
    if cache.window is not None:
        raise NotImplementedError(
            "`fork` of a cache that keeps a window is not supported: its rows overwrite the pages "
            "that they would share."
        )
    rows = _check_row_ids(cache, rows, "fork")
    if any_tracer(cache, rows):
        return _fork(cache, rows)
    if (stuck := np.flatnonzero(np.asarray(cache.overflowed)[np.asarray(rows)])).size:
        raise ValueError(f"Rows {stuck.tolist()} of `rows` have overflowed and cannot be forked.")
    needed = _pages_needed(cache, np.asarray(rows))
    if needed > cache.num_pages:
        raise ValueError(
            f"{needed} pages are needed to hold these rows apart, but the pool has "
            f"{cache.num_pages}. Create the cache with a larger num_pages."
        )
    return _eager_fork(cache.pages, cache.replace(pages=None), rows)


def _pages_needed(cache: KVCache, rows) -> int:
    full = np.asarray(cache.lengths)[rows] // cache.page_size
    table = np.asarray(cache.page_table)[rows]
    shared = np.unique(np.concatenate([table[b, :n] for b, n in enumerate(full)] or [[]]))
    return shared.size + int(
        (np.ceil(np.asarray(cache.lengths)[rows] / cache.page_size) - full).sum()
    )


def _fork(cache: KVCache, rows) -> KVCache:
    """Every new row keeps its parent's full pages and gets pages nobody holds for the rest.

    Open pages are read into device memory first and written after, so that a page may be both the
    source of one copy and the target of another.
    """
    absent = (rows < 0) | (rows >= cache.batch)
    parent = jnp.clip(rows, 0, cache.batch - 1)
    lengths, table = cache.lengths[parent], cache.page_table[parent]
    full = lengths // cache.page_size
    shared = jnp.arange(cache.max_pages)[None, :] < full[:, None]
    free = _free_pages(cache.replace(page_table=table), shared)
    has_open = (lengths % cache.page_size) > 0
    # Pages that hold tokens first, then the others: a short pool runs out at the far end.
    distance = _column(cache) - full[:, None] + ~has_open[:, None]
    order = jnp.where(shared, -1, distance).ravel()
    rank = jnp.argsort(jnp.argsort(order, stable=True))
    rank = rank.reshape(shared.shape) - jnp.sum(shared)
    fresh = jnp.take(free, jnp.where(shared, 0, rank), mode="fill", fill_value=cache.num_pages)
    new_table = jnp.where(shared, table, fresh).astype(jnp.int32)

    open_page = jnp.clip(full, 0, cache.max_pages - 1)[:, None]
    source = jnp.where(has_open, jnp.take_along_axis(table, open_page, 1)[:, 0], -1)
    target = jnp.where(has_open, jnp.take_along_axis(new_table, open_page, 1)[:, 0], -1)
    pages = write_pages(cache, read_pages(cache, source), target)
    lost = has_open & (target >= cache.num_pages)  # the pool is too small
    return cache.replace(
        pages=pages,
        page_table=new_table,
        lengths=lengths,
        overflowed=cache.overflowed[parent] | absent | lost,
    )


def _free_pages(cache: KVCache, held):
    """Ids of the pages outside the `held` part of the table, then P for "none left"."""
    used = jnp.zeros((cache.num_pages,), bool)
    used = used.at[jnp.where(held, cache.page_table, cache.num_pages)].set(True, mode="drop")
    ids = jnp.arange(cache.num_pages, dtype=jnp.int32)
    return jnp.sort(jnp.where(used, cache.num_pages, ids))


@functools.partial(jax.jit, donate_argnums=0)
def _eager_fork(pages, rest, rows):
    """Donates the pages alone: with another number of rows nothing else can be reused."""
    return _fork(rest.replace(pages=pages), rows)


def _column(cache: KVCache):
    return jnp.arange(cache.max_pages, dtype=jnp.int32)[None, :]


def _check_row_ids(cache: KVCache, rows, name: str):
    rows = _checks.as_int32("rows", rows)
    if rows.ndim != 1:
        raise TypeError(f"`rows` should be an array of one dimension, but got {rows.shape}.")
    if cache.batch_axis is not None:
        raise NotImplementedError(
            f"`{name}` of a cache whose batch is split over mesh axis {cache.batch_axis!r} would "
            "move pages between devices; it is not supported."
        )
    if not any_tracer(rows):
        values = np.asarray(rows)
        if ((values < 0) | (values >= cache.batch)).any():
            raise ValueError(
                f"`rows` should be in [0, B={cache.batch}), but got {values.tolist()}."
            )
    return rows
