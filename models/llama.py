"""The Llama architecture in Flax NNX, reading its past from a `directkv_jax.KVCache`.

The cache is an argument and a result of every call, never a variable of the model: a jitted step
can then donate the cache alone, and the parameters stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import directkv_jax
from directkv_jax.models.config import LlamaConfig
from directkv_jax.models.prefill import prompt_attention
from directkv_jax.rope import rotate

DTYPES = ("bfloat16", "float16", "float32")

# (query [B,T,N,H], key [B,T,K,H], value [B,T,K,H], cache, layer=int) -> (out [B,T,N,H], cache)
AttentionFn = Callable[..., tuple[jax.Array, directkv_jax.KVCache]]


class Attention(nnx.Module):
    """Projections and rotary embedding around an attention that also stores keys and values."""

    def __init__(self, config: LlamaConfig, *, dtype, rngs: nnx.Rngs):
        linear = _linear(config.attention_bias, dtype, rngs)
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = linear(config.hidden_size, heads * self.head_dim)
        self.k_proj = linear(config.hidden_size, kv_heads * self.head_dim)
        self.v_proj = linear(config.hidden_size, kv_heads * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, config.hidden_size)

    def __call__(self, x, rotation, cache, layer, attention: AttentionFn):
        """x [B,T,D] -> (attention [B,T,D], cache with the keys and values of this layer)."""

        def split(y):
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        query = rotate(split(self.q_proj(x)), rotation)
        key = rotate(split(self.k_proj(x)), rotation)
        out, cache = attention(query, key, split(self.v_proj(x)), cache, layer=layer)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), cache


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig, *, dtype, rngs: nnx.Rngs):
        linear = _linear(config.mlp_bias, dtype, rngs)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B,T,D] -> [B,T,D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """One pre-norm block. It does not know its own index, so one compiled function serves all."""

    def __init__(self, config: LlamaConfig, *, dtype, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config, dtype, rngs)
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = _norm(config, dtype, rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, rotation, cache, layer, attention: AttentionFn):
        """x [B,T,D] -> (x [B,T,D], cache with the tokens of this layer stored)."""
        normed = self.input_layernorm(x)
        y, cache = self.self_attn(normed, rotation, cache, layer, attention)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Llama(nnx.Module):
    """A decoder-only Llama model: RMSNorm, RoPE, grouped queries, SwiGLU.

    Args:
      config: shapes and constants.
      dtype: bfloat16, float16 or float32; of parameters, activations and the cache alike. Norms,
        rotations and logits are computed in float32.
      rngs: for random parameters; `load` fills an abstract model instead.

    Example::

      graphdef, params = nnx.split(model)

      @functools.partial(jax.jit, donate_argnames="cache")
      def step(params, tokens, cache):
          return nnx.merge(graphdef, params)(tokens, cache)

      logits, cache = step(params, tokens, model.create_cache(batch=1, max_length=4096))
    """

    def __init__(self, config: LlamaConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        if dtype.name not in DTYPES:
            raise TypeError(f"`dtype` should be one of {', '.join(DTYPES)}, but got {dtype}.")
        self.config, self.dtype = config, dtype
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(
            [DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = _norm(config, dtype, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(False, dtype, rngs)(config.hidden_size, config.vocab_size)

    def __call__(
        self, tokens, cache, query_seq_lengths=None, *, implementation: str | None = None
    ) -> tuple[jax.Array, directkv_jax.KVCache]:
        """Decodes T new tokens for each row: attends to the cache and to each other, causally.

        Args:
          tokens: int32[B, T].
          cache: the keys and values of everything before. Under jit, donate it.
          query_seq_lengths: int32[B], how many of the T are valid; 0 leaves a row as it is.
          implementation: of `directkv_jax.decode_attention`.

        Returns:
          (float32 logits [B, T, vocabulary], the cache advanced by the valid tokens).
        """
        if query_seq_lengths is None:
            query_seq_lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        attention = functools.partial(
            directkv_jax.decode_attention,
            query_seq_lengths=query_seq_lengths,
            implementation=implementation,
        )
        x, cache = self.hidden(tokens, cache.lengths, cache, attention)
        return self.logits(x), cache.advance(query_seq_lengths)

    def prefill(
        self, tokens, cache, query_seq_lengths, *, implementation: str | None = None
    ) -> tuple[jax.Array, directkv_jax.KVCache]:
        """Reads whole prompts into an empty cache, attending on the device.

        Args:
          tokens: int32[B, T], padded at the end.
          cache: an empty cache; its contents are not read. Under jit, donate it.
          query_seq_lengths: int32[B], the length of each prompt.
          implementation: of `directkv_jax.append`.

        Returns:
          (float32 logits [B, vocabulary] after the last valid token, the cache advanced).
        """
        attention = functools.partial(
            prompt_attention, query_seq_lengths=query_seq_lengths, implementation=implementation
        )
        start = jnp.zeros_like(query_seq_lengths)
        x, cache = self.hidden(tokens, start, cache, attention)
        return self.logits(last_token(x, query_seq_lengths)), cache.advance(query_seq_lengths)

    def hidden(self, tokens, start, cache, attention: AttentionFn):
        """All layers, unrolled: tokens [B,T] at positions from `start` int32[B] -> x [B,T,D]."""
        x, rotation = self.embed_tokens(tokens), self.rotations(start, tokens.shape[1])
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, rotation, cache, index, attention)
        return x, cache

    def rotations(self, start, num_tokens: int):
        """(cos, sin) of positions start .. start + T - 1."""
        positions = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
        return self.config.rope.rotations(positions)

    def logits(self, x: jax.Array) -> jax.Array:
        """Final norm and output projection, [..., D] -> float32[..., vocabulary]."""
        x = self.norm(x)
        if self.config.tie_word_embeddings:
            weight, axis = self.embed_tokens.embedding[...], 1
        else:
            weight, axis = self.lm_head.kernel[...], 0
        contract = (((x.ndim - 1,), (axis,)), ((), ()))
        return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)

    def create_cache(self, batch: int, max_length: int, **options) -> directkv_jax.KVCache:
        """A `KVCache` with the shapes and dtype of this model; `options` as `KVCache.create`."""
        return directkv_jax.KVCache.create(
            batch,
            max_length,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            num_layers=self.config.num_hidden_layers,
            dtype=self.dtype,
            **options,
        )


def last_token(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B,T,D] -> [B,D], the last valid token of each row."""
    index = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


def _linear(use_bias: bool, dtype, rngs: nnx.Rngs):
    return functools.partial(
        nnx.Linear, use_bias=use_bias, dtype=dtype, param_dtype=dtype, rngs=rngs
    )


def _norm(config: LlamaConfig, dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=dtype, rngs=rngs
    )
