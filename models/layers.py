"""The layers that models are made of, in Flax NNX."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import directkv_jax
from directkv_jax.models.cache import part_of, with_part
from directkv_jax.models.config import LayerConfig, ModelConfig
from directkv_jax.models.experts import MixtureOfExperts

# (x [B,T,D], projection, cache, layer=int, rope=, scale=, logits_soft_cap=, local_window_size=)
# -> (out [B,T,N,H], cache with keys and values of x)
AttentionFn = Callable[..., tuple[jax.Array, directkv_jax.KVCache]]

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm; computed in float32."""

    def __init__(self, config: ModelConfig, *, dtype):
        shape = (config.hidden_size,)
        self.kind, self.eps, self.offset = config.norm, config.norm_eps, config.norm_offset
        self.scale = nnx.Param(jnp.full(shape, 1.0 - config.norm_offset, dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if config.norm == "layer" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D] in x's dtype."""
        y = x.astype(jnp.float32)
        if self.bias is not None:
            y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y *= self.scale[...].astype(jnp.float32) + self.offset
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class QKV(nnx.Module):
    """The projections to queries, keys and values as one packed `directkv_jax.QKVProjection`."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype, rngs: nnx.Rngs):
        parts = layer.num_attention_heads // layer.num_key_value_heads + 2
        shape = (config.hidden_size, layer.num_key_value_heads, parts, layer.head_dim)
        # The statistics of nnx.Linear, whose kernels are [inputs, outputs].
        init = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2, 3))
        self.kernel = nnx.Param(init(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape[1:], dtype)) if config.attention_bias else None
        norm = jnp.full(shape[-1:], 1.0 - config.norm_offset, dtype)
        self.query_norm = nnx.Param(norm) if config.qk_norm else None
        self.key_norm = nnx.Param(norm) if config.qk_norm else None
        self.norm_eps, self.norm_offset = config.norm_eps, config.norm_offset

    def __call__(self) -> directkv_jax.QKVProjection:
        """The parameters: kernel [D,K,G+2,H], bias [K,G+2,H] and norms [H], or None."""
        bias, query_norm, key_norm = (
            None if part is None else part[...]
            for part in (self.bias, self.query_norm, self.key_norm)
        )
        return directkv_jax.QKVProjection(
            self.kernel[...], bias, query_norm, key_norm, self.norm_eps, self.norm_offset
        )


class Attention(nnx.Module):
    """Projections around an attention that also stores keys and values."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, part: int, *, dtype, rngs: nnx.Rngs
    ):
        width = layer.num_attention_heads * layer.head_dim
        self.layer, self.part = layer, part
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.qkv_proj = QKV(config, layer, dtype=dtype, rngs=rngs)
        self.o_proj = linear(config.output_bias, dtype, rngs)(width, config.hidden_size)

    def __call__(self, x, cache, layer, capacity: int, attention: AttentionFn):
        """x [B,T,D] -> (attention [B,T,D], cache with the keys and values of this layer)."""
        rope, window = self.layer.rope, self.layer.window
        out, part = attention(
            x, self.qkv_proj(), part_of(cache, self.part), layer=layer,
            rope=None if rope is None else rope.resolve(self.layer.head_dim, capacity),
            scale=self.scale, logits_soft_cap=self.soft_cap or None,
            local_window_size=None if window is None else (window - 1, 0),
        )  # fmt: skip
        return self.o_proj(out.reshape(*x.shape[:2], -1)), with_part(cache, self.part, part)


class MLP(nnx.Module):
    """A gated MLP, or one hidden layer."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype, rngs: nnx.Rngs):
        make = linear(config.mlp_bias, dtype, rngs)
        inner = layer.intermediate_size
        self.activation = config.activation
        self.gate_proj = make(config.hidden_size, inner) if config.gated else None
        self.up_proj = make(config.hidden_size, inner)
        self.down_proj = make(inner, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B,T,D] -> [B,T,D]."""
        activation = ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            return self.down_proj(activation(self.up_proj(x)))
        return self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """One pre-norm block. It does not know its index: one compiled function serves all alike.

    Args:
      config: of the model.
      layer: of this layer.
      part: which of `config.parts` it belongs to.
      dtype: of parameters and activations.
      rngs: for random parameters.
    """

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, part: int, *, dtype, rngs: nnx.Rngs
    ):
        def norm():
            return Norm(config, dtype=dtype)

        self.input_norm = norm()
        self.attention = Attention(config, layer, part, dtype=dtype, rngs=rngs)
        self.attention_norm = norm() if config.sandwich else None
        self.mlp_norm = norm()
        if layer.experts is None:
            self.mlp = MLP(config, layer, dtype=dtype, rngs=rngs)
        else:
            activation = ACTIVATIONS[config.activation]
            self.mlp = MixtureOfExperts(
                config.hidden_size, layer.experts, activation, dtype=dtype, rngs=rngs
            )
        self.output_norm = norm() if config.sandwich else None

    def __call__(self, x, cache, layer, capacity: int, attention: AttentionFn):
        """x [B,T,D] -> (x [B,T,D], cache with the tokens of this layer stored).

        Args:
          x: activations.
          cache: where `attention` stores keys and values; of a `ModelCache` it is given the part.
          layer: which layer of that part.
          capacity: tokens that a row of the cache has room for; RoPE may depend on it.
          attention: what attends, an `AttentionFn`.
        """
        y, cache = self.attention(self.input_norm(x), cache, layer, capacity, attention)
        x = x + (y if self.attention_norm is None else self.attention_norm(y))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.output_norm is None else self.output_norm(y)), cache


class Embedding(nnx.Module):
    """Of tokens, and of positions where a model learns those."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        def table(rows):
            return nnx.Embed(rows, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.scale, self.offset = config.embedding_scale, config.position_offset
        self.tokens = table(config.vocab_size)
        self.positions = table(config.learned_positions) if config.learned_positions else None

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """int32 [B,T] each -> [B,T,D]."""
        x = self.tokens(tokens)
        if self.scale != 1.0:
            x = x * jnp.asarray(self.scale, x.dtype)
        return x if self.positions is None else x + self.positions(positions + self.offset)


def linear(use_bias: bool, dtype, rngs: nnx.Rngs):
    """`nnx.Linear` of one dtype, to be called with (inputs, outputs)."""
    return functools.partial(
        nnx.Linear, use_bias=use_bias, dtype=dtype, param_dtype=dtype, rngs=rngs
    )
