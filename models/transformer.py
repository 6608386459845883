"""A decoder-only transformer in Flax NNX, reading its past from a `ModelCache`.

The cache is an argument and a result of every call, never a variable of the model: a jitted step
can then donate the cache alone, and the parameters stay where they are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

import directkv_jax
from directkv_jax.models.cache import ModelCache
from directkv_jax.models.config import ModelConfig
from directkv_jax.models.layers import AttentionFn, DecoderLayer, Embedding, Norm, linear
from directkv_jax.models.prefill import prompt_attention

DTYPES = ("bfloat16", "float16", "float32")


class Transformer(nnx.Module):
    """A decoder-only model of any family in `families`.

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

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        if dtype.name not in DTYPES:
            raise TypeError(f"`dtype` should be one of {', '.join(DTYPES)}, but got {dtype}.")
        self.config, self.dtype = config, dtype
        self.embed = Embedding(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                DecoderLayer(config, layer, part, dtype=dtype, rngs=rngs)
                for layer, (part, _) in zip(config.layers, config.places, strict=True)
            ]
        )
        self.norm = Norm(config, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = linear(False, dtype, rngs)(config.hidden_size, config.vocab_size)

    def __call__(
        self, tokens, cache, query_seq_lengths=None, *, implementation: str | None = None
    ) -> tuple[jax.Array, ModelCache]:
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
    ) -> tuple[jax.Array, ModelCache]:
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
    ) -> tuple[jax.Array, ModelCache]:
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
            attend, query_seq_lengths=lengths, implementation=implementation
        )
        x, cache = self.hidden(tokens, cache, cache.lengths, cache.max_length, attention)
        return x, cache.advance(lengths)

    def hidden(self, tokens, cache, lengths, capacity: int, attention: AttentionFn):
        """All layers, unrolled.

        Args:
          tokens: int32[B, T].
          cache: handed from layer to layer through `attention`.
          lengths: int32[B], tokens before these.
          capacity: tokens that a row of the cache has room for.
          attention: what attends, an `AttentionFn`.

        Returns:
          (x [B,T,D], cache).
        """
        positions = lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        x = self.embed(tokens, positions)
        for layer, (_, index) in zip(self.layers, self.config.places, strict=True):
            x, cache = layer(x, cache, index, capacity, attention)
        return x, cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Final norm and output projection, [..., D] -> float32[..., vocabulary]."""
        x = self.norm(x)
        if self.config.tie_word_embeddings:
            weight, axis = self.embed.tokens.embedding[...], 1
        else:
            weight, axis = self.lm_head.kernel[...], 0
        contract = (((x.ndim - 1,), (axis,)), ((), ()))
        logits = jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)
        cap = self.config.logit_soft_cap
        return cap * jnp.tanh(logits / cap) if cap else logits

    def create_cache(self, batch: int, max_length: int, **options) -> ModelCache:
        """A cache for this model, of its dtype; `options` as `ModelCache.create`."""
        return ModelCache.create(self.config, batch, max_length, dtype=self.dtype, **options)


def _lengths(tokens, query_seq_lengths):
    if query_seq_lengths is None:
        return jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    return query_seq_lengths


def last_token(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B,T,D] -> [B,D], the last valid token of each row."""
    index = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(x, index, axis=1)[:, 0]
