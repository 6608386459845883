"""Attention among the tokens of a prompt, on the device, and the bulk append to the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import directkv_jax
from directkv_jax._platform import compiling_ahead, platform_of

# Longer prompts attend in blocks of this many queries, so that the scores take
# B * N * 512 * T floats of device memory and not B * N * T * T.
QUERY_BLOCK = 512


def prompt_attention(
    x,
    projection: directkv_jax.QKVProjection,
    cache,
    *,
    layer,
    rope: directkv_jax.RoPE | None,
    query_seq_lengths,
    implementation: str | None = None,
) -> tuple[jax.Array, directkv_jax.KVCache]:
    """`directkv_jax.qkv_attention` of ragged prompts that begin an empty cache.

    Args:
      x: [B, T, D].
      projection: to queries, keys and values.
      cache: receives keys and values of the valid tokens; nothing of it is read.
      layer: where in the cache.
      rope: the rotary embedding; the prompts begin at position 0.
      query_seq_lengths: int32[B], the valid tokens of each row. Outputs beyond are unspecified.
      implementation: of `directkv_jax.append`.

    Returns:
      (out [B, T, N, H] in the dtype of the cache, cache); lengths are unchanged.
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    parts = projection(x, positions, rope)
    query, key, value = (part.astype(cache.dtype) for part in parts)
    out = causal_attention(query, key, value, query_seq_lengths)
    cache = directkv_jax.append(
        cache,
        key,
        value,
        layer=layer,
        query_seq_lengths=query_seq_lengths,
        after=out,
        implementation=implementation,
    )
    return out, cache


def causal_attention(query, key, value, lengths) -> jax.Array:
    """`jax.nn.dot_product_attention` over the valid tokens.

    On CUDA by cuDNN, which never holds the scores, for 16 bits and a head dim that all its versions
    take; else by XLA, in blocks of queries when long. cuDNN cannot be compiled for without a GPU.
    """
    if (
        platform_of() == "cuda"
        and not compiling_ahead()
        and query.dtype != jnp.float32
        and query.shape[-1] <= 128
    ):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    if query.dtype == jnp.float16:  # XLA does not compile all products of JAX's attention in it
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        return causal_attention(query, key, value, lengths).astype(jnp.float16)
    tokens = query.shape[1]
    if tokens <= QUERY_BLOCK or tokens % QUERY_BLOCK:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
        )

    def block(start):
        rows = jax.lax.dynamic_slice_in_dim(query, start, QUERY_BLOCK, axis=1)
        visible = jnp.arange(tokens) <= start + jnp.arange(QUERY_BLOCK)[:, None]
        return jax.nn.dot_product_attention(
            rows, key, value, mask=visible[None, None], key_value_seq_lengths=lengths
        )

    blocks = jax.lax.map(block, jnp.arange(0, tokens, QUERY_BLOCK))
    return jnp.moveaxis(blocks, 0, 1).reshape(query.shape)
