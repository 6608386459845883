"""What the two Flax drop-ins share: how a held cache is made, checked and decoded with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from directkv_jax import _checks
from directkv_jax._platform import any_tracer
from directkv_jax._sharding import axis_size
from directkv_jax.attention import decode_attention
from directkv_jax.cache import KVCache
from directkv_jax.memory import PLACEMENTS

# Why Flax's options cannot hold for a paged cache. An ignored mask would be a wrong answer.
_REFUSED = {
    "mask": "a row sees its own cached tokens and the new ones causally, no other mask; give "
    "ragged rows by `query_seq_lengths`",
    "sow_weights": "the attention weights are never formed",
    "attention_fn": "attention over the cache is this library's own, so a custom function (a bias, "
    "a window, rotary positions) would be left out",
    "input_positions": "they only reach a custom `attention_fn`",
    "qk_attn_weights_einsum_cls": "the attention weights are never formed",
    "attn_weights_value_einsum_cls": "the attention weights are never formed",
    "dropout_rate": "dropout is active (deterministic=False) and has no place in decoding; pass "
    "deterministic=True",
}


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """Where and how a module allocates its cache; `KVCache.create` explains each field."""

    placement: str = "host"
    page_size: int = 64
    mesh: Mesh | None = None
    kv_head_axis: str | None = None
    batch_axis: str | None = None

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f'`cache_placement` should be "host" or "device", but got {self.placement!r}.'
            )

    def create(self, batch_dims, max_length: int, *, num_kv_heads: int, head_dim: int, dtype):
        """An empty cache of one layer; the batch dimensions are rows, in C order."""
        return KVCache.create(
            math.prod(batch_dims),
            max_length,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            **vars(self),
        )


def refuse_in_decode(**options: Any) -> None:
    """Raises for the first option that is neither None nor False.

    Raises:
      NotImplementedError: names the option and the reason.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"`{name}` is not supported when decoding with a KVCache: "
                f"{_REFUSED.get(name, 'it is unknown here')}. With decode=False everything is "
                "Flax's own."
            )


def refuse_outside_decode(**options: Any) -> None:
    """Raises for an argument that only decoding understands.

    Raises:
      ValueError: names the argument and both remedies.
    """
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"`{name}` is only understood when decoding, but decode=False. Set decode=True, or "
                f"leave `{name}` away (outside decoding, rows are masked by `mask`)."
            )


def check_held(cache: Any, remedy: str) -> KVCache:
    """A cache that came out of Flax's hands, fit for use; else an error that ends in `remedy`.

    Flax's idiom `jax.tree.map(jnp.zeros, eval_shape(init))` makes arrays of zeros. A host cache is
    then told by its type. A device cache would look right, but all rows would own page 0: known
    values are refused, and traced ones make lengths of -1, so that the rows give NaN and are
    flagged.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"`cache` should be a KVCache, but got {type(cache).__name__}. {remedy}")
    try:
        _checks.check_cache(cache)
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from None
    pages_per_shard = cache.page_table.size // axis_size(cache.mesh, cache.batch_axis)
    if cache.placement == "host" or pages_per_shard == 1:
        return cache
    if any_tracer(cache.page_table):
        blank = ~jnp.any(cache.page_table)
        return cache.replace(lengths=jnp.where(blank, -1, cache.lengths))
    if not np.asarray(cache.page_table).any():
        raise ValueError(
            "The page table of this cache is all zeros, as jnp.zeros of an abstract cache makes "
            f"it: all rows would share one page. {remedy}"
        )
    return cache


def empty_like(cache: KVCache) -> KVCache:
    """A real, empty cache with the shapes and options of a possibly abstract one."""
    return KVCache.create(
        cache.batch,
        cache.max_length,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        num_layers=cache.num_layers,
        dtype=cache.dtype,
        page_size=cache.page_size,
        placement=cache.placement,
        mesh=cache.mesh,
        kv_head_axis=cache.kv_head_axis,
        batch_axis=cache.batch_axis,
    )


def decode(query, key, value, cache: KVCache, *, query_seq_lengths=None, **options):
    """`decode_attention` for any number of batch dimensions.

    Args:
      query: `[batch..., T, N, H]`.
      key: `[batch..., T, K, H]`.
      value: `[batch..., T, K, H]`.
      cache: of B = prod(batch) rows. Lengths do not change.
      query_seq_lengths: an int, or integers of shape `[batch...]`.
      **options: `layer` and `implementation`.

    Returns:
      (out `[batch..., T, N, H]`, cache).
    """
    batch_dims = query.shape[:-3]
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    out, cache = decode_attention(
        query, key, value, cache, query_seq_lengths=rows(query_seq_lengths), **options
    )
    return out.reshape(*batch_dims, *out.shape[1:]), cache


def rows(query_seq_lengths):
    """`query_seq_lengths` with its batch dimensions made one."""
    if query_seq_lengths is None or isinstance(query_seq_lengths, int):
        return query_seq_lengths
    x = jnp.asarray(query_seq_lengths)
    return x.reshape(-1) if x.ndim else x


def advance(cache: KVCache, tokens: int, query_seq_lengths) -> KVCache:
    """The cache after a step of T tokens: as Flax counts its `cache_index`, after every call."""
    return cache.advance(tokens if query_seq_lengths is None else rows(query_seq_lengths))
