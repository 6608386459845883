"""A mixture of experts without dropping: every token reaches all the experts it chooses."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from directkv_jax.models.config import Experts


class MixtureOfExperts(nnx.Module):
    """A router, and the gated MLPs of E experts in stacked kernels.

    The tokens are sorted by expert, so that each expert multiplies its own: a grouped matrix
    product (`jax.lax.ragged_dot`) of as many rows as there are choices.
    """

    def __init__(
        self, width: int, experts: Experts, activation: Callable, *, dtype, rngs: nnx.Rngs
    ):
        def kernel(*shape):
            init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
            return nnx.Param(init(rngs.params(), shape, dtype))

        count, inner = experts.count, experts.width
        self.experts, self.activation = experts, activation
        self.router = nnx.Linear(
            width, count, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.gate_proj = kernel(count, width, inner)
        self.up_proj = kernel(count, width, inner)
        self.down_proj = kernel(count, inner, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B,T,D] -> [B,T,D]."""
        each = self.experts.per_token
        tokens = x.reshape(-1, x.shape[-1])
        weights = jax.nn.softmax(self.router(tokens).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(weights, each)  # [M, each]
        if self.experts.normalize:
            weights /= jnp.sum(weights, axis=-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts.count).astype(jnp.int32)
        rows = tokens[order // each]
        gate = jax.lax.ragged_dot(rows, self.gate_proj[...], sizes)
        up = jax.lax.ragged_dot(rows, self.up_proj[...], sizes)
        out = jax.lax.ragged_dot(self.activation(gate) * up, self.down_proj[...], sizes)
        out = jnp.zeros_like(out).at[order].set(out).reshape(-1, each, x.shape[-1])
        out = jnp.einsum("mkd,mk->md", out.astype(jnp.float32), weights)
        return out.astype(x.dtype).reshape(x.shape)
