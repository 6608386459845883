"""`qkv_attention` of few tokens on CUDA: projection and attention in one call, then the append."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from directkv_jax._sharding import CacheSpecs, axis_size, over_mesh
from directkv_jax.attention import refuse_gradients, row_specs, run_append
from directkv_jax.cache import KVCache
from directkv_jax.implementations import _fused
from directkv_jax.implementations._base import Options, Rows


def unsupported_reason(name: str, x, projection, cache: KVCache) -> str | None:
    """Why projection and attention are two calls here; None if they are one."""
    if name != "cuda":
        return f'implementation "{name}" has no fused kernel'
    arrays = (projection.kernel, projection.bias, projection.query_norm, projection.key_norm)
    dtypes = [array.dtype for array in (x, *arrays) if array is not None]
    rows = x.shape[0] // axis_size(cache.mesh, cache.batch_axis) * x.shape[1]
    return _fused.unsupported_reason([*dtypes, cache.dtype], rows)


def _decode(cache, x, projection, turns, layer, seq_lengths, options: Options, name: str):
    x, projection = jax.tree.map(refuse_gradients, (x, projection))
    none = jnp.zeros((0,), cache.dtype)
    optional = (projection.bias, projection.query_norm, projection.key_norm)
    weights = _fused.Weights(
        projection.kernel, *(none if array is None else array for array in optional)
    )
    norms = _fused.Norms(projection.norm_eps, projection.norm_offset)
    specs = CacheSpecs(cache.batch_axis, cache.kv_head_axis)

    def run(x, cos, sin, kernel, bias, query_norm, key_norm, pages, *rows):
        weights = _fused.Weights(kernel, bias, query_norm, key_norm)
        return _fused.qkv_attend(x, weights, (cos, sin), pages, Rows(*rows), options, norms)

    bias_spec = specs.scalar if projection.bias is None else specs.bias
    in_specs = (
        specs.input, specs.turns, specs.turns, specs.kernel, bias_spec, specs.scalar, specs.scalar,
        *row_specs(specs),
    )  # fmt: skip
    out_specs = (specs.tokens, specs.lse, specs.tokens, specs.tokens)
    out, lse, key, value = over_mesh(run, cache.mesh, in_specs, out_specs)(
        x, *turns, *weights, cache.pages, cache.page_table, cache.lengths, seq_lengths, layer
    )
    return out, lse, run_append(cache, key, value, layer, seq_lengths, out, name)


_STATIC = ("options", "name")
traced_decode = jax.jit(_decode, inline=True, static_argnames=_STATIC)
eager_decode = jax.jit(_decode, donate_argnames="cache", static_argnames=_STATIC)
