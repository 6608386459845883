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

DTYPES = ("bfloat16", "float16", "float32")

# (x [B,T,D], projection, cache, layer=int) -> (out [B,T,N,H], cache with keys and values of x)
AttentionFn = Callable[..., tuple[jax.Array, directkv_jax.KVCache]]


class QKV(nnx.Module):
    """The projections to queries, keys and values as one packed `directkv_jax.QKVProjection`."""

    def __init__(self, config: LlamaConfig, *, dtype, rngs: nnx.Rngs):
        kv_heads = config.num_key_value_heads
        parts = config.num_attention_heads // kv_heads + 2
        shape = (config.hidden_size, kv_heads, parts, config.head_dim)
        # The statistics of nnx.Linear, whose kernels are [inputs, outputs].
        init = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2, 3))
        self.kernel = nnx.Param(init(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape[1:], dtype)) if config.attention_bias else None

    def __call__(self) -> directkv_jax.QKVProjection:
        """The parameters: kernel [D,K,G+2,H], and bias [K,G+2,H] or None."""
        return directkv_jax.QKVProjection(
            self.kernel[...], None if self.bias is None else self.bias[...]
        )


class Attention(nnx.Module):
    """Projections around an attention that also stores keys and values."""

    def __init__(self, config: LlamaConfig, *, dtype, rngs: nnx.Rngs):
        width = config.num_attention_heads * config.head_dim
        self.qkv_proj = QKV(config, dtype=dtype, rngs=rngs)
        self.o_proj = _linear(config.attention_bias, dtype, rngs)(width, config.hidden_size)

    def __call__(self, x, cache, layer, attention: AttentionFn):
        """x [B,T,D] -> (attention [B,T,D], cache with the keys and values of this layer)."""
        out, cache = attention(x, self.qkv_proj(), cache, layer=layer)
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

    def __call__(self, x, cache, layer, attention: AttentionFn):
        """x [B,T,D] -> (x [B,T,D], cache with the tokens of this layer stored)."""
        y, cache = self.self_attn(self.input_layernorm(x), cache, layer, attention)
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
        """Reads T new tokens of each row: they attend to the cache and to each other, causally.

        One token at a time this decodes; chunk by chunk it reads a prompt (`read`).

        Args:
          tokens: int32[B, T].
          cache: the keys and values of everything before. Under jit, donate it.
          query_seq_lengths: int32[B], how many of the T are valid; 0 leaves a row as it is.
          implementation: of `directkv_jax.qkv_attention`.

        Returns:
          (float32 logits [B, T, vocabulary], the cache advanced by the valid tokens).

        Raises:
          ValueError, TypeError, NotImplementedError: as `directkv_jax.qkv_attention`.
        """
        lengths = _lengths(tokens, query_seq_lengths)
        x, cache = self._read(directkv_jax.qkv_attention, tokens, cache, lengths, implementation)
        return self.logits(x), cache

    def read(
        self, tokens, cache, query_seq_lengths=None, *, implementation: str | None = None
    ) -> tuple[jax.Array, directkv_jax.KVCache]:
        """Calls the model for what follows its last valid token alone.

        So a prompt is read in chunks, with device memory for one chunk whatever its length::

          for start in range(0, tokens.shape[1], chunk):
              valid = jnp.clip(lengths - start, 0, chunk)
              new, cache = read(params, tokens[:, start : start + chunk], cache, valid)
              logits = jnp.where(valid[:, None] > 0, new, logits)

        where `read` is this method under jit with `cache` donated.

        Args:
          tokens: as the call of the model.
          cache: as there.
          query_seq_lengths: as there.
          implementation: as there.

        Returns:
          (float32 logits [B, vocabulary] after the last valid token, the cache advanced). Those of
          a row without valid tokens mean nothing.

        Raises:
          ValueError, TypeError, NotImplementedError: as `directkv_jax.qkv_attention`.
        """
        lengths = _lengths(tokens, query_seq_lengths)
        x, cache = self._read(directkv_jax.qkv_attention, tokens, cache, lengths, implementation)
        return self.logits(last_token(x, lengths)), cache

    def prefill(
        self, tokens, cache, query_seq_lengths, *, implementation: str | None = None
    ) -> tuple[jax.Array, directkv_jax.KVCache]:
        """Reads whole prompts into an empty cache at once, attending on the device.

        Args:
          tokens: int32[B, T], padded at the end.
          cache: an empty cache; its contents are not read. Under jit, donate it.
          query_seq_lengths: int32[B], the length of each prompt.
          implementation: of `directkv_jax.append`.

        Returns:
          (float32 logits [B, vocabulary] after the last valid token, the cache advanced).

        Raises:
          ValueError, TypeError, NotImplementedError: as `directkv_jax.append`.
        """
        x, cache = self._read(prompt_attention, tokens, cache, query_seq_lengths, implementation)
        return self.logits(last_token(x, query_seq_lengths)), cache

    def _read(self, attend, tokens, cache, lengths, implementation):
        attention = functools.partial(
            attend,
            rope=self.config.rope,
            query_seq_lengths=lengths,
            implementation=implementation,
        )
        x, cache = self.hidden(tokens, cache, attention)
        return x, cache.advance(lengths)

    def hidden(self, tokens, cache, attention: AttentionFn):
        """All layers, unrolled: tokens [B,T] -> (x [B,T,D], cache)."""
        x = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, cache, index, attention)
        return x, cache

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


def _lengths(tokens, query_seq_lengths):
    if query_seq_lengths is None:
        return jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    return query_seq_lengths


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
