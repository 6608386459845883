"""Builds caches with known content: ragged lengths, shuffled pages, NaN everywhere else."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import directkv_jax
from directkv_jax import _pages


@dataclasses.dataclass
class Built:
    """A cache and what it holds: `keys`, `values` `[L, B, max_length, K, H]`, NaN if unwritten."""

    cache: directkv_jax.KVCache
    keys: np.ndarray
    values: np.ndarray


def build(
    lengths, *, max_length, num_kv_heads=2, head_dim=64, num_layers=1, dtype=jnp.float32,
    page_size=16, seed=0, **create,
) -> Built:  # fmt: skip
    """A cache with `lengths` random tokens in each row, in shuffled pages; the rest is NaN."""
    rng = np.random.default_rng(seed)
    cache = directkv_jax.KVCache.create(
        len(lengths), max_length, num_kv_heads=num_kv_heads, head_dim=head_dim,
        num_layers=num_layers, dtype=dtype, page_size=page_size, **create,
    )  # fmt: skip
    table = rng.permutation(cache.num_pages)[: cache.batch * cache.max_pages]
    table = table.reshape(cache.batch, cache.max_pages).astype(np.int32)
    shape = (num_layers, cache.batch, cache.max_length, num_kv_heads, head_dim)
    beyond = np.arange(cache.max_length)[None, :] >= np.asarray(lengths)[:, None]
    keys, values = random(rng, shape, dtype), random(rng, shape, dtype)
    keys[:, beyond], values[:, beyond] = np.nan, np.nan
    pages = np.full((num_layers, cache.num_pages, num_kv_heads, cache.layout.tile_elements), np.nan)
    pages = pages.astype(cache.dtype)
    pages[:, table.ravel()] = to_pages(cache.layout, keys, values)
    cache = set_pages(cache, pages)
    cache = cache.replace(
        page_table=jax.device_put(table, cache.page_table.sharding),
        lengths=jax.device_put(np.int32(lengths), cache.lengths.sharding),
    )
    return Built(cache, keys, values)


def random(rng, shape, dtype) -> np.ndarray:
    """Standard normal numbers of a dtype."""
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def tokens(seed, batch, count, query_heads, kv_heads, head_dim, dtype, seq_lengths=None):
    """query, key, value of `count` new tokens; NaN from `seq_lengths` on, where nobody may look."""
    rng = np.random.default_rng(seed)
    arrays = [
        random(rng, (batch, count, heads, head_dim), dtype)
        for heads in (query_heads, kv_heads, kv_heads)
    ]
    if seq_lengths is not None:
        unused = np.arange(count)[None, :] >= np.asarray(seq_lengths)[:, None]
        for array in arrays:
            array[unused] = np.nan
    return arrays


def to_pages(layout, keys, values) -> np.ndarray:
    """Tokens `[L, B, max_length, K, H]` as pages `[L, B * max_pages, K, E]`, row after row."""
    layers, batch, _length, heads, dim = keys.shape
    both = np.stack([keys, values], axis=2)  # [L, B, 2, S, K, H]
    both = both.reshape(layers, batch, 2, -1, layout.page_size, heads, dim)
    both = np.moveaxis(both, (3, 5), (2, 3))  # [L, B, max_pages, K, 2, page_size, H]
    return layout.pack(both).reshape(layers, -1, heads, layout.tile_elements)


def set_pages(cache: directkv_jax.KVCache, pages) -> directkv_jax.KVCache:
    """The cache with all of its pages overwritten, in place."""
    data = np.moveaxis(np.asarray(pages), 1, 0)
    return _write_all(cache, data, np.arange(cache.num_pages, dtype=np.int32))


def all_pages(cache: directkv_jax.KVCache) -> np.ndarray:
    """Every page as NumPy `[L, P, K, E]`."""
    ids = np.arange(cache.num_pages, dtype=np.int32)
    return np.moveaxis(np.asarray(_read(cache, ids)), 0, 1)


def read_tokens(cache: directkv_jax.KVCache) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values `[L, B, max_length, K, H]` of all slots; anything where there is no page."""
    table = np.clip(np.asarray(cache.page_table), 0, cache.num_pages - 1)
    pages = all_pages(cache)[:, table]  # [L, B, max_pages, K, E]
    both = np.moveaxis(cache.layout.unpack(pages), (4, 3), (2, 5))  # [L, B, 2, pages, size, K, H]
    layers, batch = both.shape[:2]
    both = both.reshape(layers, batch, 2, -1, cache.num_kv_heads, cache.head_dim)
    return both[:, :, 0], both[:, :, 1]


def same_bits(a, b) -> bool:
    """Bit for bit equal, NaN included."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def pointers(cache: directkv_jax.KVCache) -> list[int]:
    """The addresses of the shards of the pages."""
    return [address for address, _ in directkv_jax.memory.base_pointers(cache.pages)]


@functools.partial(jax.jit, donate_argnums=0)
def _write_all(cache, data, ids):
    return cache.replace(pages=_pages.write_pages(cache, data, ids))


_read = jax.jit(_pages.read_pages)
