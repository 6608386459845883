"""Paged reads and writes in plain JAX, shared by the `xla` and `reference` implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from directkv_jax._layout import PageLayout
from directkv_jax._platform import DEVICE, memory_space
from directkv_jax.implementations._base import Rows, Storage


def visible(rows: Rows, queries: int, fresh: int, slots: int, window_left: int):
    """bool `[B, T, slots + fresh]`: which cached slots and fresh tokens each query sees.

    Columns are the slots 0..slots-1 of the row in order of position, then the fresh tokens. For a
    row of length 3 with 2 fresh tokens, 4 slots and no window:

        slots    fresh
        1 1 1 0  1 0     query 0
        1 1 1 0  1 1     query 1
    """
    length = rows.lengths[:, None, None]
    query = jnp.arange(queries)[None, :, None]
    slot = jnp.arange(slots)[None, None, :]
    token = jnp.arange(fresh)[None, None, :]
    cached_ok = jnp.broadcast_to(slot < length, (length.shape[0], queries, slots))
    fresh_ok = jnp.broadcast_to(token <= query, (length.shape[0], queries, fresh))
    if window_left >= 0:
        cached_ok &= slot >= length + query - window_left
        fresh_ok &= token >= query - window_left
    valid = (query < rows.seq_lengths[:, None, None]) & (rows.seq_lengths >= 0)[:, None, None]
    return jnp.concatenate([cached_ok, fresh_ok], axis=-1) & valid


def sound(rows: Rows, tokens: int, num_layers: int, num_pages: int, layout: PageLayout, window=-1):
    """bool `[B]`: lengths, layer and all page ids that reading the row needs are in range."""
    page_table, lengths, seq_lengths, layer = rows
    capacity = page_table.shape[1] * layout.page_size
    page = jnp.arange(page_table.shape[1])[None, :] * layout.page_size
    needed = page < lengths[:, None]
    if window >= 0:
        end = jnp.minimum(page + layout.page_size, lengths[:, None])
        needed &= end > (lengths - window)[:, None]
    ids_ok = jnp.all(((page_table >= 0) & (page_table < num_pages)) | ~needed, axis=1)
    lengths_ok = (lengths >= 0) & (lengths <= capacity)
    tokens_ok = (seq_lengths >= 0) & (seq_lengths <= tokens)
    return ids_ok & lengths_ok & tokens_ok & (layer >= 0) & (layer < num_layers)


def read_rows(pages, rows: Rows, layout: PageLayout):
    """Keys and values of one layer, token by token: two device arrays `[B, S, K, H]`.

    A host cache is copied to the device, one layer of it.
    """
    layer = jnp.clip(rows.layer, 0, pages.shape[0] - 1)
    one = jax.lax.dynamic_index_in_dim(pages, layer, 0, keepdims=False)
    one = layout.unpack(_to(DEVICE, one))  # [P, K, 2, page_size, H]
    table = jnp.clip(rows.page_table, 0, pages.shape[1] - 1)
    tokens = jnp.moveaxis(one[table], 2, 4)  # [B, max_pages, 2, page_size, K, H]
    batch, max_pages = table.shape
    flat = (batch, max_pages * layout.page_size, layout.num_kv_heads, layout.head_dim)
    return tokens[:, :, 0].reshape(flat), tokens[:, :, 1].reshape(flat)


def append(pages, key, value, rows: Rows, storage: Storage, after=None):
    """`pages` with the valid new tokens of each row written, all of a row's or none.

    A host cache goes through the device and back; on the CPU backend XLA does that in place.
    """
    del after  # JAX orders its own reads and writes
    layout = storage.layout
    page_table, lengths, seq_lengths, layer = rows
    num_layers, num_pages = pages.shape[:2]
    tokens = key.shape[1]
    position = lengths[:, None] + jnp.arange(tokens)[None, :]
    valid = jnp.arange(tokens)[None, :] < seq_lengths[:, None]
    slot_page = jnp.clip(position // layout.page_size, 0, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, slot_page, axis=1)
    in_range = (page >= 0) & (page < num_pages) & (position >= 0)
    in_range &= position < page_table.shape[1] * layout.page_size
    row_ok = jnp.all(in_range | ~valid, axis=1) & (seq_lengths <= tokens) & (lengths >= 0)
    row_ok &= (layer >= 0) & (layer < num_layers)
    target = jnp.where(valid & row_ok[:, None], page, num_pages)  # out of range: dropped
    slot = position % layout.page_size
    space = memory_space(pages)
    on_device = layout.unpack(_to(DEVICE, pages))
    update = jnp.stack([key, value], axis=3)  # [B, T, K, 2, H]
    on_device = on_device.at[layer, target, :, :, slot].set(update, mode="drop")
    return _to(space, layout.pack(on_device))


def _to(space, x):
    """`x` in another memory space. The barriers keep XLA from fusing the transfer with a reshape.

    Without them XLA on a GPU makes one bitcast of both and then refuses it: a bitcast cannot
    change the memory space.
    """
    if memory_space(x) == space:
        return x
    return jax.lax.optimization_barrier(jax.device_put(jax.lax.optimization_barrier(x), space))


def read_pages(pages, page_ids, storage: Storage):
    """Whole pages `[n, L, K, E]`, zeros for ids out of range."""
    del storage
    picked = jnp.take(
        _to(DEVICE, pages),
        jnp.where(page_ids < 0, pages.shape[1], page_ids),
        axis=1,
        mode="fill",
        fill_value=0,
    )
    return jnp.moveaxis(picked, 1, 0)


def write_pages(pages, data, page_ids, storage: Storage):
    """`pages` with whole pages `[n, L, K, E]` written; ids out of range are skipped."""
    del storage
    target = jnp.where(page_ids < 0, pages.shape[1], page_ids)
    on_device = _to(DEVICE, pages)
    on_device = on_device.at[:, target].set(jnp.moveaxis(data, 0, 1), mode="drop")
    return _to(memory_space(pages), on_device)
