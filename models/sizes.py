"""The few sizes that programs are compiled for: of prompts, their chunks and the cache."""

from __future__ import annotations

import math

import jax.numpy as jnp

from directkv_jax.models.config import LayerConfig, ModelConfig
from directkv_jax.models.prefill import QUERY_BLOCK

SMALLEST_BUCKET = 16
# Above this a power of two would waste too much memory for a cache; multiples of it are taken.
LARGEST_DOUBLING = 4096
# On a CPU chunks stay short: what attends among the tokens of the first one computes the half that
# nobody sees too, and what attends to the cache does not.
CPU_CHUNK = 512


def bucket(tokens: int) -> int:
    """The next power of two, at least 16."""
    return max(SMALLEST_BUCKET, 1 << math.ceil(math.log2(max(1, tokens))))


def capacity(tokens: int) -> int:
    """Tokens per row of a cache that is to hold `tokens`: few different sizes, little waste."""
    if tokens <= LARGEST_DOUBLING:
        return bucket(tokens)
    return math.ceil(tokens / LARGEST_DOUBLING) * LARGEST_DOUBLING


def chunk_sizes(tokens: int, chunk: int) -> tuple[int, ...]:
    """How many of `tokens` are read at once: `chunk` as often as it fits, a bucket for the rest.

    The bucket is no larger than `chunk`; a prompt that fits into one chunk is all rest.
    """
    whole, rest = divmod(tokens, chunk)
    return (chunk,) * whole + ((min(chunk, bucket(rest)),) if rest else ())


def chunk_tokens(config: ModelConfig, dtype, batch: int, budget: int) -> int:
    """The largest chunk, a power of two, whose `layer_bytes` are within `budget`; at least 16."""
    tokens = SMALLEST_BUCKET
    while layer_bytes(config, dtype, batch, 2 * tokens) <= budget:
        tokens *= 2
    return tokens


def layer_bytes(config: ModelConfig, dtype, batch: int, tokens: int) -> int:
    """Bytes of device memory for the activations of one layer that reads T = `tokens` of each row.

    That of the widest layer. With s the bytes of an element of `dtype` and I the intermediate size
    (of all experts that a token goes to)::

      B T (4 (N + 2 K) H        queries, keys and values, float32
           + s (2 D + 3 I)      x, x normed; gate, up and their product
           + 4 N min(T, 512))   scores of a block of queries, float32

    An estimate from above, as if all were alive at once; weights and logits are not in it.
    """
    size = jnp.dtype(dtype).itemsize

    def of(layer: LayerConfig) -> int:
        heads, experts = layer.num_attention_heads, layer.experts
        projected = 4 * (heads + 2 * layer.num_key_value_heads) * layer.head_dim
        inner = experts.per_token * experts.width if experts else layer.intermediate_size
        streams = size * (2 * config.hidden_size + 3 * inner)
        return projected + streams + 4 * heads * min(tokens, QUERY_BLOCK)

    return batch * tokens * max(map(of, config.layers))
