"""Attention among the tokens of a prompt, on the device, and the bulk append to the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import directkv_jax

# Longer prompts attend in blocks of this many queries, so that the scores take
# B * N * 512 * T floats of device memory and not B * N * T * T.
QUERY_BLOCK = 512


def prompt_attention(
    query, key, value, cache, *, layer, query_seq_lengths, implementation: str | None = None
) -> tuple[jax.Array, directkv_jax.KVCache]:
    """Causal attention of ragged prompts that begin an empty cache, then `append`.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H].
      value: [B, T, K, H].
      cache: receives key and value of the valid tokens; nothing of it is read.
      layer: where in the cache.
      query_seq_lengths: int32[B], the valid tokens of each row. Outputs beyond are unspecified.
      implementation: of `directkv_jax.append`.

    Returns:
      (out [B, T, N, H], cache); lengths are unchanged.
    """
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
    """`jax.nn.dot_product_attention` over the valid tokens, in blocks of queries when long."""
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
