"""Whole pages of a cache, out of it and into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax._platform import any_tracer, platform_of
from directkv_jax._sharding import CacheSpecs, axis_size, over_mesh
from directkv_jax.implementations import Request, choose

if TYPE_CHECKING:
    from directkv_jax.cache import KVCache


def read_pages(cache: KVCache, page_ids):
    """Whole pages as a device array `[n, L, K, E]`; zeros for ids out of range."""
    specs = CacheSpecs(None, cache.kv_head_axis)
    mover, storage = _page_mover(cache), cache.storage
    return over_mesh(
        lambda pages, ids: mover.read_pages(pages, ids, storage),
        cache.mesh,
        (specs.pages, specs.scalar),
        specs.pages,
    )(cache.pages, page_ids)


def write_pages(cache: KVCache, data, page_ids):
    """The pages array with whole pages `[n, L, K, E]` written; ids out of range are skipped."""
    specs = CacheSpecs(None, cache.kv_head_axis)
    mover, storage = _page_mover(cache), cache.storage
    return over_mesh(
        lambda pages, data, ids: mover.write_pages(pages, data, ids, storage),
        cache.mesh,
        (specs.pages, specs.pages, specs.scalar),
        specs.pages,
    )(cache.pages, data, page_ids)


jitted_read_pages = jax.jit(read_pages)


def _page_mover(cache: KVCache):
    heads = cache.num_kv_heads
    platform = platform_of(cache.pages, cache.mesh)
    return choose(
        None, Request(platform, cache.placement, cache.dtype, cache.head_dim, heads, heads)
    )


def gather(cache: KVCache, layer: int, row: int, start: int, stop: int):
    """Keys and values of tokens `[start, stop)` of a row as NumPy `[n, K, H]`."""
    if any_tracer(cache):
        raise ValueError("`gather` is for debugging and cannot be traced; call it outside jit.")
    in_range = 0 <= layer < cache.num_layers and 0 <= row < cache.batch
    if not in_range or not 0 <= start <= stop <= cache.max_length:
        raise ValueError(
            f"`gather` takes layer < L={cache.num_layers}, row < B={cache.batch} and 0 <= start <= "
            f"stop <= {cache.max_length}, but got layer={layer}, row={row}, [{start}, {stop}); the "
            f"rows hold {np.asarray(cache.lengths).tolist()} tokens."
        )
    if cache.written is not None and start < np.asarray(cache.written)[row] - cache.kept_length:
        raise ValueError(
            f"Row {row} has held {np.asarray(cache.written)[row]} tokens and keeps the last "
            f"{cache.kept_length}, so those from {start} on are gone."
        )
    first, last = start // cache.page_size, -(-stop // cache.page_size)
    if cache.batch_axis is not None:
        pages = np.asarray(jax.device_get(cache.pages))[layer]
        shards = axis_size(cache.mesh, cache.batch_axis)
        shard = row // max(1, cache.batch // shards)
        ids = np.asarray(cache.page_table)[row, first:last] + shard * cache.pages_per_shard
        tiles = pages[ids]
    else:
        ids = np.asarray(cache.page_table)[row, first:last]
        # Called eagerly over a mesh, XLA could not move the pages out of host memory.
        read = read_pages if cache.mesh is None else jitted_read_pages
        tiles = np.asarray(read(cache, jnp.asarray(ids)))[:, layer]
    rows = np.moveaxis(cache.layout.unpack(tiles), 2, 0)  # [2, n_pages, K, page_size, H]
    flat = np.moveaxis(rows, 3, 2).reshape(2, -1, cache.num_kv_heads, cache.head_dim)
    cut = slice(start - first * cache.page_size, stop - first * cache.page_size)
    return flat[0, cut].copy(), flat[1, cut].copy()
