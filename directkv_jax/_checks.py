"""Checks of the public entries: shapes and types while tracing, values only where known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax._layout import MAX_LENGTH
from directkv_jax._platform import any_tracer, is_concrete, memory_space
from directkv_jax.memory import space_of


def check_array(name: str, x, letters: str, sizes: Sequence[int], dtype) -> None:
    """`x` has the given sizes, one for each letter, and dtype; else an error naming both."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"`{name}` should be an array, but got {type(x).__name__}.")
    if tuple(x.shape) != tuple(sizes):
        expected = ", ".join(f"{a}={n}" for a, n in zip(letters, sizes, strict=True))
        raise ValueError(f"`{name}` should have shape ({expected}), but got {tuple(x.shape)}.")
    if x.dtype != dtype:
        raise TypeError(
            f"`{name}` should have the dtype of the cache, {jnp.dtype(dtype)}, but got {x.dtype}. "
            f"Cast it, or create the cache with dtype={x.dtype}."
        )


def check_query(query, cache) -> tuple[int, int]:
    """(T, N) of a query `[B, T, N, H]` that fits the cache."""
    if getattr(query, "ndim", None) != 4:
        got = getattr(query, "shape", type(query).__name__)
        raise ValueError(f"`query` should have shape (B, T, N, H), but got {got}.")
    _, tokens, heads, _ = query.shape
    check_array("query", query, "BTNH", (cache.batch, tokens, heads, cache.head_dim), cache.dtype)
    if heads == 0 or heads % cache.num_kv_heads:
        raise ValueError(
            f"`query` should have a multiple of K={cache.num_kv_heads} heads, but got N={heads}."
        )
    return tokens, heads


def check_alive(cache) -> None:
    """The cache was not donated away.

    Raises:
      TypeError: it is none.
      ValueError: it was consumed by an earlier call, or deleted.
    """
    if not hasattr(cache, "page_table"):
        raise TypeError(f"`cache` should be a KVCache, but got {type(cache).__name__}.")
    for array in (cache.pages, cache.page_table, cache.lengths, cache.overflowed):
        if is_concrete(array) and array.is_deleted():
            raise ValueError(
                "This cache was already donated to an earlier call, or deleted. Use the cache that "
                "the call returned."
            )


def check_cache(cache) -> None:
    """The cache is whole: not donated away, and typed to live where it was placed.

    Raises:
      ValueError: it was consumed by an earlier call, or lost its `<host>` type.
    """
    check_alive(cache)
    pages = cache.pages
    expected = space_of(cache.placement)
    if (space := memory_space(pages)) != expected:
        raise ValueError(
            f'The cache has placement "{cache.placement}", so `pages` should be typed to live in '
            f"{expected}, but its type is {jax.typeof(pages)} in {space}. Create caches with "
            "KVCache.create (jnp.zeros of an abstract cache makes device arrays); an array that "
            "only lost its type (from_dlpack, addressable_shards, an untyped out_shardings) gets "
            "it back from directkv_jax.memory.retype."
        )


def check_layer(layer, num_layers: int) -> jax.Array:
    """`layer` as int32 `[]`; a value known now is checked now."""
    if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool):
        if not 0 <= layer < num_layers:
            raise ValueError(f"`layer` should be in [0, L={num_layers}), but got {layer}.")
        return jnp.int32(layer)
    if getattr(layer, "shape", None) != () or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise TypeError(f"`layer` should be an int or an integer scalar array, but got {layer!r}.")
    if not any_tracer(layer):
        return check_layer(int(layer), num_layers)
    return as_int32("layer", layer)


def as_int32(name: str, x) -> jax.Array:
    """Integers as an int32 array.

    Of a traced array, what int32 cannot hold becomes the nearest that it can, out of every range.

    Raises:
      TypeError: they are no integers.
      ValueError: they are known, and int32 cannot hold one.
    """
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    traced = any_tracer(x)
    # Looked at before JAX sees them: without 64-bit types it keeps the lower half of the bits.
    values: Any = jnp.asarray(x) if traced else np.asarray(x)
    huge = values.dtype == object and all(isinstance(each, int) for each in values.flat)
    if not huge and not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"`{name}` should hold integers, but has dtype {values.dtype}.")
    if traced:
        if jnp.iinfo(values.dtype).max > high:
            values = jnp.clip(values, max(jnp.iinfo(values.dtype).min, low), high)
        return values.astype(jnp.int32)
    if huge or (values.size and not low <= values.min() <= values.max() <= high):
        raise ValueError(f"`{name}` should hold int32, but got {values.tolist()!r:.80}.")
    return jnp.asarray(values.astype(np.int32))


def check_rows_argument(name: str, x, batch: int) -> jax.Array:
    """An int or integer array `[B]` as int32 `[B]`."""
    x = as_int32(name, x)
    if x.shape not in ((), (batch,)):
        raise ValueError(f"`{name}` should have shape (B={batch},), but got {x.shape}.")
    return jnp.broadcast_to(x, (batch,))


def check_window(local_window_size, kept: int | None = None) -> int:
    """The left window of `jax.nn.dot_product_attention`'s `local_window_size`, -1 for none.

    `kept`: the window of the cache, which a query must not look beyond.
    """
    left = _window_left(local_window_size)
    if kept is not None and not 0 <= left < kept:
        raise ValueError(
            f"This cache keeps a window of {kept} tokens, so `local_window_size` should be at most "
            f"({kept - 1}, 0), but got {local_window_size}."
        )
    return left


def _window_left(local_window_size) -> int:
    if local_window_size is None:
        return -1
    pair = local_window_size
    if isinstance(pair, (int, np.integer)):
        pair = (pair, pair)
    ints = isinstance(pair, tuple) and all(isinstance(x, (int, np.integer)) for x in pair)
    if not ints or len(pair) != 2 or min(pair) < 0:
        raise (ValueError if ints else TypeError)(
            "`local_window_size` should be a non-negative int or a pair (left, right) of them, but "
            f"got {local_window_size!r}. A Hugging Face sliding_window=W is (W - 1, 0)."
        )
    left, _ = pair
    return min(int(left), MAX_LENGTH)


def check_num_ctas(num_ctas) -> int:
    """`num_ctas` as the kernels take it: 0 for None."""
    if num_ctas is None:
        return 0
    if isinstance(num_ctas, bool) or not isinstance(num_ctas, (int, np.integer)):
        raise TypeError(f"`num_ctas` should be an int or None, but got {num_ctas!r}.")
    if not 1 <= num_ctas <= 1 << 16:
        raise ValueError(f"`num_ctas` should be from 1 to 65536 or None, but got {num_ctas}.")
    return int(num_ctas)


def check_values(cache, seq_lengths, writes: bool) -> None:
    """What can be checked only where values are known: eager calls.

    Raises:
      ValueError: lengths, page ids or new tokens are out of range, or do not fit.
    """
    lengths, table = np.asarray(cache.lengths), np.asarray(cache.page_table)
    n, capacity = np.asarray(seq_lengths), cache.max_length
    if ((lengths < 0) | (lengths > capacity)).any():
        raise ValueError(f"`lengths` should be in [0, {capacity}], but got {lengths.tolist()}.")
    end = lengths + (n if writes else 0)
    if writes and (end > capacity).any():
        row = int(np.argmax(end > capacity))
        raise ValueError(
            f"Row {row} holds {lengths[row]} tokens and {n[row]} more do not fit: the cache has "
            f"room for {capacity} per row. Create it with a larger max_length."
        )
    if writes and (stuck := np.asarray(cache.overflowed) & (n != 0)).any():
        raise ValueError(
            f"Rows {np.flatnonzero(stuck).tolist()} overflowed earlier and accept no tokens until "
            "cache.reset()."
        )
    pages_per_rank = cache.pages_per_shard
    needed = np.arange(table.shape[1])[None, :] * cache.page_size < end[:, None]
    if (needed & ((table < 0) | (table >= pages_per_rank))).any():
        raise ValueError(
            f"`page_table` should hold page ids in [0, {pages_per_rank}) for the tokens of each "
            f"row, but got {table[needed].min()} to {table[needed].max()}."
        )


def check_seq_lengths(seq_lengths, tokens: int) -> None:
    """`query_seq_lengths` with known values is in [0, T]."""
    values = np.asarray(seq_lengths)
    if ((values < 0) | (values > tokens)).any():
        raise ValueError(
            f"`query_seq_lengths` should be in [0, T={tokens}], but got {values.tolist()}."
        )
