"""The QKV projection fused with attention, on CUDA: one FFI call, for a decode step's few tokens.

The projection kernel reads the weights; the attention kernel starts meanwhile, fetches tiles of the
cache until its ring is full, and goes on when the queries are there. The call reads the cache and
returns device results only; the new keys and values are among them, to be appended.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax import _native
from directkv_jax.implementations._base import Options, Rows
from directkv_jax.implementations._native import attributes, workspace_bytes

# B * T: csrc/cuda/project_plan.h.
MAX_ROWS = 32


class Weights(NamedTuple):
    """The arrays of a projection; arrays without elements stand for None.

    Attributes:
      kernel: `[D, K, G + 2, H]`.
      bias: `[K, G + 2, H]` or `[0]`.
      query_norm: `[H]` or `[0]`.
      key_norm: `[H]` or `[0]`.
    """

    kernel: jax.Array
    bias: jax.Array
    query_norm: jax.Array
    key_norm: jax.Array


class Norms(NamedTuple):
    """The static part of the norms of query and key."""

    eps: float
    offset: float


def unsupported_reason(dtypes, rows: int) -> str | None:
    """Why the kernel cannot project `rows` rows of arrays of these dtypes; None if it can."""
    if len(set(dtypes)) > 1 or jnp.dtype(next(iter(dtypes))).itemsize != 2:
        return "x, all weights and the cache should have one 16-bit dtype"
    if rows > MAX_ROWS:
        return f"B * T is {rows}; at most {MAX_ROWS} rows are projected by the fused kernel"
    return None


def qkv_attend(x, weights: Weights, turns, pages, rows: Rows, options: Options, norms: Norms):
    """Projects and attends.

    Args:
      x: `[B, T, D]`.
      weights: of the projection.
      turns: cosine and sine of the RoPE, float32 `[B, T, 1, R/2]`; R is 0 without one.
      pages: `[L, P, K, E]`.
      rows: as for `attend`.
      options: as for `attend`.
      norms: as they are.

    Returns:
      out `[B, T, N, H]`, lse float32 `[B, T, N]`, key and value `[B, T, K, H]`.
    """
    return _call(options, norms)(x, *turns, *weights, pages, *rows)


@functools.lru_cache(maxsize=256)
def _call(options: Options, norms: Norms):
    """qkv_attend as a function of arrays only; vmap of it is refused by name."""

    @jax.custom_batching.custom_vmap
    def call(x, cos, sin, kernel, bias, query_norm, key_norm, pages, page_table, *rest):
        batch, tokens, _ = x.shape
        kv_heads, head_dim = kernel.shape[1], kernel.shape[3]
        query_shape = (batch, tokens, kv_heads * (kernel.shape[2] - 2), head_dim)
        query = jax.ShapeDtypeStruct(query_shape, x.dtype)
        fresh = jax.ShapeDtypeStruct((batch, tokens, kv_heads, head_dim), x.dtype)
        lse_like = jax.ShapeDtypeStruct(query_shape[:3], jnp.float32)
        size = workspace_bytes("cuda", query, page_table, options.storage)
        workspace = jax.ShapeDtypeStruct((size,), jnp.uint8)
        flags = jax.ShapeDtypeStruct((batch * tokens, kv_heads * kernel.shape[2]), jnp.int32)
        out, lse, _, key, value, _, _ = jax.ffi.ffi_call(
            _native.QKV_ATTEND, (query, lse_like, query, fresh, fresh, flags, workspace)
        )(
            x, kernel, bias, query_norm, key_norm, cos, sin, pages, page_table, *rest,
            **attributes(options.storage),
            scale=np.float32(options.scale),
            soft_cap=np.float32(options.soft_cap),
            window_left=np.int32(options.window_left),
            num_ctas=np.int32(options.num_ctas),
            norm_eps=np.float32(norms.eps),
            norm_offset=np.float32(norms.offset),
        )  # fmt: skip
        return out, lse, key, value

    @call.def_vmap
    def refuse(size, batched, *operands):
        del size, batched, operands
        raise NotImplementedError(
            "jax.vmap of `qkv_attention` is not supported: the mapped elements would write the "
            "same slots of one cache. Put the mapped axis into the batch of one cache."
        )

    return call
