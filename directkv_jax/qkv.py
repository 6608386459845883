"""Attention from a layer's input: QKV projection, norms of query and key, RoPE, attend, append."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from directkv_jax import _checks, _fused_qkv
from directkv_jax._platform import any_tracer
from directkv_jax.attention import Call, decode_attention, prepare
from directkv_jax.cache import KVCache
from directkv_jax.rope import RoPE, rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QKVProjection:
    """The packed weights of a layer, KV head by KV head: G queries, the key, the value.

    Query head n belongs to KV head n // G.

    Attributes:
      kernel: `[D, K, G + 2, H]`, float32, bfloat16 or float16.
      bias: `[K, G + 2, H]`, or None.
      query_norm: `[H]`, weights of an RMSNorm over each query head before RoPE, or None.
      key_norm: `[H]`, the same of each key.
      norm_eps: added to the mean square.
      norm_offset: added to the weights of the norms; 1.0 for models that store them minus one.
    """

    kernel: jax.Array
    bias: jax.Array | None = None
    query_norm: jax.Array | None = None
    key_norm: jax.Array | None = None
    norm_eps: float = dataclasses.field(default=1e-6, metadata={"static": True})
    norm_offset: float = dataclasses.field(default=0.0, metadata={"static": True})

    @classmethod
    def pack(
        cls, query, key, value, *, query_bias=None, key_bias=None, value_bias=None, **norms: Any
    ) -> QKVProjection:
        """Packs separate weights.

        Args:
          query: `[D, N, H]`, N a multiple of K.
          key: `[D, K, H]`.
          value: `[D, K, H]`.
          query_bias: `[N, H]`; all three biases or none.
          key_bias: `[K, H]`.
          value_bias: `[K, H]`.
          **norms: the other attributes.

        Raises:
          ValueError: the shapes do not fit each other.
        """
        biases = (query_bias, key_bias, value_bias)
        if any(bias is None for bias in biases) != all(bias is None for bias in biases):
            raise ValueError("`query_bias`, `key_bias` and `value_bias` should be all or none.")
        bias = None if query_bias is None else _packed(*biases, "bias of the ")
        return cls(_packed(query, key, value, ""), bias, **norms)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(D, K, G, H)."""
        width, kv_heads, parts, head_dim = self.kernel.shape
        return width, kv_heads, parts - 2, head_dim

    def __call__(self, x, positions, rope: RoPE | None = None):
        """Queries, keys and values of tokens.

        Args:
          x: `[B, T, D]`.
          positions: int32 `[B, T]`, for `rope`.
          rope: the rotary embedding of queries and keys, or None.

        Returns:
          query `[B, T, N, H]`, key and value `[B, T, K, H]` in float32: sums, norms and rotation
          are not rounded in between.
        """
        width, kv_heads, group, head_dim = self.sizes
        dtype = jnp.promote_types(x.dtype, self.kernel.dtype)
        packed = jnp.matmul(
            x.astype(dtype), self.kernel.astype(dtype).reshape(width, -1),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        packed = packed.reshape(*x.shape[:2], kv_heads, group + 2, head_dim)
        if self.bias is not None:
            packed += self.bias.astype(jnp.float32)[None, None]
        query, key, value = jnp.split(packed, (group, group + 1), axis=3)
        query = query.reshape(*x.shape[:2], kv_heads * group, head_dim)
        query = self._normed(query, self.query_norm)
        key = self._normed(key[:, :, :, 0], self.key_norm)
        if rope is not None:
            rotations = rope.rotations(positions)
            query, key = rotate(query, rotations), rotate(key, rotations)
        return query, key, value[:, :, :, 0]

    def _normed(self, x, weight):
        if weight is None:
            return x
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.norm_eps)
        weight = weight.astype(jnp.float32) + self.norm_offset
        return x * scale * weight[None, None, None]


def qkv_attention(
    x, projection: QKVProjection, cache: KVCache, *, layer=0, rope: RoPE | None = None,
    query_seq_lengths=None, **options: Any,
):  # fmt: skip
    """Projects, attends to the cached tokens and the new ones, appends the new ones to the cache.

    `decode_attention` from the input of a layer: token `t` of row `b` stands at position
    `cache.lengths[b] + t`, for RoPE too. Sums, norms and rotation are computed in float32 and
    rounded once, to the dtype of the cache. What is said there of donation, lengths and overflow
    holds here. On CUDA a step of up to 32 rows (B * T) whose x, weights and cache are of one 16-bit
    dtype is fused: the cache is fetched while the weights are still being multiplied.

    Args:
      x: `[B, T, D]`, D a multiple of 8; T is the number of new tokens.
      projection: weights for the K, H of the cache; any of the three dtypes.
      cache: the cache.
      layer: which layer of the cache.
      rope: the rotary embedding, `RoPE.create(..., capacity=cache.max_length)`; None for none.
      query_seq_lengths: int32 `[B]`, how many of the T tokens are valid in each row.
      **options: of `decode_attention`: `scale`, `logits_soft_cap`, `local_window_size`,
        `return_residual`, `implementation`, `num_ctas`.

    Returns:
      `(out, cache)`, or `((out, lse), cache)` with `return_residual`. out is `[B, T, N, H]` in the
      dtype of the cache, lse float32 `[B, T, N]`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `decode_attention`.
    """
    _checks.check_cache(cache)
    _check(x, projection, cache, rope)
    positions = cache.lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    call = _prepare(x, projection, cache, layer, query_seq_lengths, **options)
    if _fused_qkv.unsupported_reason(call.name, x, projection, cache):
        parts = projection(x, positions, rope)
        query, key, value = (part.astype(cache.dtype) for part in parts)
        return decode_attention(
            query, key, value, cache, layer=layer, query_seq_lengths=query_seq_lengths, **options
        )
    run: Any = _fused_qkv.traced_decode
    if not any_tracer(x, projection, cache, call.layer, call.seq_lengths):
        _checks.check_seq_lengths(call.seq_lengths, call.tokens)
        _checks.check_values(cache, call.seq_lengths, writes=True)
        run = _fused_qkv.eager_decode
    out, lse, cache = run(
        cache, x, projection, _turns(rope, positions), call.layer, call.seq_lengths, call.options,
        call.name,
    )  # fmt: skip
    return ((out, lse) if options.get("return_residual") else out), cache


def _prepare(
    x, projection: QKVProjection, cache: KVCache, layer, query_seq_lengths, *, scale=None,
    logits_soft_cap=None, local_window_size=None, sinks=None, return_residual=False,
    implementation=None, num_ctas=None,
) -> Call:  # fmt: skip
    del return_residual
    _, kv_heads, group, head_dim = projection.sizes
    query = jax.ShapeDtypeStruct((*x.shape[:2], kv_heads * group, head_dim), cache.dtype)
    return prepare(
        query, None, None, cache, layer, query_seq_lengths, scale, logits_soft_cap,
        local_window_size, sinks, implementation, num_ctas,
    )  # fmt: skip


def _turns(rope: RoPE | None, positions) -> tuple[jax.Array, jax.Array]:
    if rope is None:
        none = jnp.zeros((*positions.shape, 1, 0), jnp.float32)
        return none, none
    return rope.rotations(positions)


def _packed(query, key, value, what: str) -> jax.Array:
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        if array.ndim != query.ndim or array.shape[:-2] != query.shape[:-2]:
            raise ValueError(f"The {what}{name} does not fit the query: {array.shape}.")
        if array.shape[-1] != query.shape[-1] or array.dtype != query.dtype:
            raise ValueError(f"The {what}{name} has another H or dtype than the query.")
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if value.shape != key.shape or kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"The {what}query should have a multiple of the heads of key and value, but has "
            f"{heads}, of {kv_heads} and {value.shape[-2]}."
        )
    query = query.reshape(*query.shape[:-2], kv_heads, heads // kv_heads, query.shape[-1])
    return jnp.concatenate([query, key[..., None, :], value[..., None, :]], axis=-2)


def _check(x, projection: QKVProjection, cache: KVCache, rope: RoPE | None) -> None:
    if not isinstance(projection, QKVProjection):
        raise TypeError(
            f"`projection` should be a QKVProjection, but got {type(projection).__name__}."
        )
    if not isinstance(rope, RoPE | None):
        raise TypeError(f"`rope` should be a RoPE or None, but got {type(rope).__name__}.")
    if projection.kernel.ndim != 4 or projection.kernel.shape[2] < 3:
        raise ValueError(
            "`projection.kernel` should have shape (D, K, G + 2, H), but got "
            f"{projection.kernel.shape}."
        )
    width, kv_heads, group, head_dim = projection.sizes
    if (kv_heads, head_dim) != (cache.num_kv_heads, cache.head_dim):
        raise ValueError(
            f"`projection` is for K={kv_heads} heads of H={head_dim}, the cache for "
            f"K={cache.num_kv_heads} heads of H={cache.head_dim}."
        )
    if width % 8:
        raise ValueError(f"D should be a multiple of 8, but is {width}.")
    if getattr(x, "ndim", None) != 3 or (x.shape[0], x.shape[2]) != (cache.batch, width):
        got = getattr(x, "shape", type(x).__name__)
        raise ValueError(f"`x` should have shape (B={cache.batch}, T, D={width}), but got {got}.")
    shapes = {
        "bias": (kv_heads, group + 2, head_dim), "query_norm": (head_dim,), "key_norm": (head_dim,)
    }  # fmt: skip
    for name, shape in shapes.items():
        array = getattr(projection, name)
        if array is not None and array.shape != shape:
            raise ValueError(
                f"`projection.{name}` should have shape {shape}, but got {array.shape}."
            )
    for name, dtype in {"x": x.dtype, "projection.kernel": projection.kernel.dtype}.items():
        if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(
                f"`{name}` should be float32, bfloat16 or float16, but its dtype is {dtype}."
            )
    if rope is not None and rope.rotary_dim > head_dim:
        raise ValueError(f"The rotary dim {rope.rotary_dim} should be at most H={head_dim}.")
