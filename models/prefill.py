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
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    local_window_size: tuple[int, int] | None = None,
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
      scale: as `qkv_attention`.
      logits_soft_cap: as there; with one, this is `qkv_attention`.
      local_window_size: as there.
      implementation: of `directkv_jax.append`.

    Returns:
      (out [B, T, N, H] in the dtype of the cache, cache); lengths are unchanged.
    """
    if logits_soft_cap:  # which `jax.nn.dot_product_attention` has not
        return directkv_jax.qkv_attention(
            x, projection, cache, layer=layer, rope=rope, query_seq_lengths=query_seq_lengths,
            scale=scale, logits_soft_cap=logits_soft_cap, local_window_size=local_window_size,
            implementation=implementation,
        )  # fmt: skip
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    parts = projection(x, positions, rope)
    query, key, value = (part.astype(cache.dtype) for part in parts)
    out = causal_attention(
        query, key, value, query_seq_lengths, scale=scale, window=local_window_size
    )
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


def causal_attention(query, key, value, lengths, *, scale=None, window=None) -> jax.Array:
    """`jax.nn.dot_product_attention` over the valid tokens; `window` is (left, right).

    On CUDA by cuDNN, which never holds the scores, for 16 bits and a head dim that all its versions
    take; else by XLA, in blocks of queries when long. cuDNN cannot be compiled for without a GPU.
    """
    options = {"scale": scale, "key_value_seq_lengths": lengths}
    if (
        platform_of() == "cuda"
        and not compiling_ahead()
        and query.dtype != jnp.float32
        and query.shape[-1] <= 128
    ):
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, query_seq_lengths=lengths,
            local_window_size=window, implementation="cudnn", **options,
        )  # fmt: skip
    if query.dtype == jnp.float16:  # XLA does not compile all products of JAX's attention in it
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        out = causal_attention(query, key, value, lengths, scale=scale, window=window)
        return out.astype(jnp.float16)
    tokens = query.shape[1]
    if tokens <= QUERY_BLOCK or tokens % QUERY_BLOCK:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, query_seq_lengths=lengths,
            local_window_size=window, **options,
        )  # fmt: skip

    def block(start):
        rows = jax.lax.dynamic_slice_in_dim(query, start, QUERY_BLOCK, axis=1)
        behind = start + jnp.arange(QUERY_BLOCK)[:, None] - jnp.arange(tokens)
        visible = behind >= 0 if window is None else (behind >= 0) & (behind <= window[0])
        return jax.nn.dot_product_attention(rows, key, value, mask=visible[None, None], **options)

    blocks = jax.lax.map(block, jnp.arange(0, tokens, QUERY_BLOCK))
    return jnp.moveaxis(blocks, 0, 1).reshape(query.shape)
