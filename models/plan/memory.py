"""The bytes of a model, of its cache and of its activations, and how many of them a step reads."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from directkv_jax._layout import DTYPES, MAX_LENGTH, PageLayout
from directkv_jax.memory import PLACEMENTS
from directkv_jax.models.config import LayerConfig, ModelConfig
from directkv_jax.models.kinds import BYTES, COUNT, check_all
from directkv_jax.models.sizes import bucket, chunk_tokens, layer_bytes

# The kernels' own, 15.0 MiB at most: benchmarks/results/2026-11-30-h200-attention-shapes.json.
WORKSPACE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is asked of a model.

    Attributes:
      batch: B, rows decoded together.
      context: tokens of prompt and answer that each row has room for.
      placement: where keys and values live, "host" or "device".
      dtype: of weights, activations and cache.
      page_size: tokens per page of the cache.
      prefill_bytes: device memory for the activations of a layer, as in `Options`.
    """

    batch: int
    context: int
    placement: str = "host"
    dtype: str = "bfloat16"
    page_size: int = 64
    prefill_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        check_all({"batch": COUNT, "context": COUNT, "prefill_bytes": BYTES}, vars(self))
        if self.context > MAX_LENGTH:
            raise ValueError(f"`context` should be at most {MAX_LENGTH}, but got {self.context}.")
        for name, known in (("placement", PLACEMENTS), ("dtype", DTYPES)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"`{name}` should be one of {', '.join(known)}, but got {value!r}."
                )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes that a workload takes, and those that one decode step reads at its full context.

    Attributes:
      parameters: how many, all experts included.
      weight_bytes: of all parameters.
      kv_bytes_per_token: of keys and values of one token in all layers, 2 L K H itemsize.
      ring_layers: layers of a sliding window that keep a ring of pages on the device.
      kv_host_bytes: of the cache, in host memory.
      kv_device_bytes: of the cache, in device memory.
      prefill_chunk: tokens of each prompt that are read at once.
      activation_bytes: at most, while prompts are read; logits and workspaces of kernels included.
      read_weight_bytes: read by a step.
      read_host_bytes: keys and values read by a step over the link.
      read_device_bytes: keys and values read by a step from device memory.
    """

    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    ring_layers: int
    kv_host_bytes: int
    kv_device_bytes: int
    prefill_chunk: int
    activation_bytes: int
    read_weight_bytes: int
    read_host_bytes: int
    read_device_bytes: int

    @property
    def device_bytes(self) -> int:
        """Weights, cache and activations in device memory."""
        return self.weight_bytes + self.kv_device_bytes + self.activation_bytes


def sizes_of(config: ModelConfig, work: Workload) -> Sizes:
    """The sizes of `work` on a model.

    Raises:
      ValueError: the page size or the head dim is none that a cache has.
    """
    held, read = {"host": 0, "device": 0}, {"host": 0, "device": 0}
    ring_layers = token_bytes = 0
    for part in config.parts:
        layout = PageLayout(work.page_size, part.num_kv_heads, part.head_dim, jnp.dtype(work.dtype))
        ring = part.keeps_window(work.context, work.page_size)
        where = "device" if ring else work.placement
        rows = work.batch * part.num_layers
        held[where] += rows * part.pages(work.context, work.page_size) * layout.page_bytes
        visible = min(work.context, part.window or work.context)
        read[where] += rows * visible * layout.bytes_per_token
        ring_layers += part.num_layers * ring
        token_bytes += part.num_layers * layout.bytes_per_token
    itemsize = jnp.dtype(work.dtype).itemsize
    chunk = chunk_tokens(config, work.dtype, work.batch, work.prefill_bytes)
    chunk = min(chunk, bucket(work.context))
    activations = layer_bytes(config, work.dtype, work.batch, chunk)
    parameters = count_parameters(config)
    return Sizes(
        parameters=parameters,
        weight_bytes=parameters * itemsize,
        kv_bytes_per_token=token_bytes,
        ring_layers=ring_layers,
        kv_host_bytes=held["host"],
        kv_device_bytes=held["device"],
        prefill_chunk=chunk,
        activation_bytes=activations + 4 * work.batch * config.vocab_size + WORKSPACE_BYTES,
        read_weight_bytes=_parameters_read(config, work.batch) * itemsize,
        read_host_bytes=read["host"],
        read_device_bytes=read["device"],
    )


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the `Transformer` of a configuration."""
    head = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    tables = (config.vocab_size + config.learned_positions) * config.hidden_size
    layers = (_layer_parameters(config, layer) for layer in config.layers)
    return tables + head + _norm_parameters(config) + sum(layers)


def _parameters_read(config: ModelConfig, batch: int) -> int:
    """Parameters that a step of `batch` tokens reads: an embedding only looked up is not read."""
    head = config.vocab_size * config.hidden_size  # the embedding, where they are tied
    layers = (_layer_parameters(config, layer, batch) for layer in config.layers)
    return head + _norm_parameters(config) + sum(layers)


def _layer_parameters(config: ModelConfig, layer: LayerConfig, batch: int | None = None) -> int:
    """All of a layer; given `batch`, without the experts that no token of a step goes to."""
    width, heads, dim = config.hidden_size, layer.num_attention_heads, layer.head_dim
    projected = (heads + 2 * layer.num_key_value_heads) * dim
    attention = width * projected + heads * dim * width
    attention += projected * config.attention_bias + width * config.output_bias
    attention += 2 * dim * config.qk_norm
    norms = (4 if config.sandwich else 2) * _norm_parameters(config)
    if (experts := layer.experts) is not None:
        count: float = experts.count
        if batch is not None:  # as many as random choices are expected to touch
            count *= 1 - (1 - experts.per_token / experts.count) ** batch
        router = width * experts.count
        return attention + norms + router + math.ceil(count * 3 * width * experts.width)
    inner, ups = layer.intermediate_size, 2 if config.gated else 1
    biases = (ups * inner + width) * config.mlp_bias
    return attention + norms + (ups + 1) * width * inner + biases


def _norm_parameters(config: ModelConfig) -> int:
    return config.hidden_size * (2 if config.norm == "layer" else 1)
