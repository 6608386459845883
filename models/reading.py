"""Reads prompts into a cache chunk by chunk, with one compiled layer called for all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from directkv_jax import qkv_attention
from directkv_jax.models import graph
from directkv_jax.models.cache import ModelCache
from directkv_jax.models.prefill import prompt_attention
from directkv_jax.models.transformer import Transformer, last_token


class PromptReader:
    """A model taken apart into its embedding and its layers.

    Each chunk passes through all layers before the next one begins. The first attends on the device
    among its own tokens, the later ones to the cache as well: device memory holds the activations
    of one chunk, however long the prompts are. One layer of each kind is compiled for
    each size of a chunk, and called as often as there are such layers; progress can be told.

    Args:
      model: the model; its parameters are shared, not copied.
      implementation: of the attention over the cache.
    """

    def __init__(self, model: Transformer, implementation: str | None = None):
        self._embed = graph.split(model.embed)
        self._layers = [graph.split(layer) for layer in model.layers]
        self._places = [index for _, index in model.config.places]  # of each in its part
        self._options = {"implementation": implementation}

    def compile(
        self, tokens, lengths, chunks: Sequence[int], cache: ModelCache, continues: bool = False
    ) -> jax.Array:
        """Compiles what `read` will need for these shapes; runs no layer and leaves the cache.

        Returns:
          an array like the one that `read` returns.
        """
        last = None
        plan = dict.fromkeys((size, attend) for _, size, attend in _plan(chunks, continues))
        for size, attend in plan:
            x, valid = _open_chunk(
                *self._embed, tokens, lengths, cache.lengths, jnp.int32(0), size=size
            )
            for layer in dict(self._layers).items():  # one of each kind
                _prefill_layer.lower(
                    *layer, x, cache, jnp.int32(0), valid, attend=attend, **self._options
                ).compile()
            last = _last_tokens(x, valid, last)
        _advance.lower(cache, lengths).compile()
        assert last is not None
        return last

    def read(
        self, tokens, lengths, chunks: Sequence[int], cache: ModelCache,
        on_progress: Callable[[int, int], None] | None = None, continues: bool = False,
    ) -> tuple[jax.Array, ModelCache]:  # fmt: skip
        """Reads whole prompts. Consumes `cache`.

        Args:
          tokens: int32[B, sum of `chunks`], padded at the end.
          lengths: int32[B], at least 1: the length of each prompt.
          chunks: how many tokens of each row are read at once, chunk by chunk.
          cache: with room for the prompts.
          on_progress: called with (layers done, layers), both counted over all chunks.
          continues: whether the cache holds tokens already, which the prompts go on from; else it
            must be empty.

        Returns:
          ([B, D] after the last layer, of the last token of each row; the cache advanced).
        """
        last = before = None
        done, total = 0, len(chunks) * len(self._layers)
        for start, size, attend in _plan(chunks, continues):
            x, valid = _open_chunk(
                *self._embed, tokens, lengths, cache.lengths, jnp.int32(start), size=size
            )
            for index, layer in zip(self._places, self._layers, strict=True):
                x, cache = _prefill_layer(
                    *layer, x, cache, jnp.int32(index), valid, attend=attend, **self._options
                )
                if on_progress:
                    # What is done, not what is queued; one layer stays so.
                    jax.block_until_ready(before)
                    on_progress(done, total)
                before, done = x, done + 1
            last = _last_tokens(x, valid, last)
            cache = _advance(cache, valid)
        assert last is not None
        return last, cache


def _plan(chunks: Sequence[int], continues: bool) -> Iterator[tuple[int, int, Callable]]:
    """(first position, tokens, attention) of each chunk."""
    start = 0
    for size in chunks:
        yield start, size, qkv_attention if start or continues else prompt_attention
        start += size


@functools.partial(jax.jit, static_argnames=("graph", "size"))
def _open_chunk(graph, params, tokens, lengths, cached, start, *, size):
    tokens = jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1)
    positions = cached[:, None] + jnp.arange(size, dtype=jnp.int32)
    return graph.merge(params)(tokens, positions), jnp.clip(lengths - start, 0, size)


# The cache is donated, or it would be copied; the parameters, an argument of their own, are not.
@functools.partial(
    jax.jit, static_argnames=("graph", "attend", "implementation"), donate_argnames="cache"
)
def _prefill_layer(graph, params, x, cache, layer, lengths, *, attend, implementation):
    attention = functools.partial(attend, query_seq_lengths=lengths, implementation=implementation)
    return graph.merge(params)(x, cache, layer, cache.max_length, attention)


@jax.jit
def _last_tokens(x, lengths, before):
    last = last_token(x, lengths)
    # A row that ended in an earlier chunk keeps what it had.
    return last if before is None else jnp.where(lengths[:, None] > 0, last, before)


@functools.partial(jax.jit, donate_argnames="cache")
def _advance(cache, lengths):
    return cache.advance(lengths)
