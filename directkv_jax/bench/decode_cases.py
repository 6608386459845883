"""What `directkv bench decode` can measure: model shapes, cases, presets and their sizes in bytes.

Nothing here touches JAX: the sizes are arithmetic, so that `--dry-run` answers at once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

PLACEMENTS = ("host", "device", "staged", "hbm-jax")
IN_HOST_MEMORY = ("host", "staged")
ATTENTIONS = ("auto", "cudnn", "xla")
ITEMSIZE = 2  # bfloat16, weights and cache alike

# Hugging Face names. The head dim is D / N where it is not given.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {  # Llama 3.1 8B
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama-1b": {  # Llama 3.2 1B
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {  # its sizes, without its norms of queries and keys
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "test": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to measure.

    Attributes:
      shape: a key of `SHAPES`.
      placement: one of `PLACEMENTS`.
      batch: B, rows of equal length.
      length: S, tokens in the cache when the steps begin.
      layers: L; of the shape when None.
      steps: timed decode steps of one token each.
      warmup: steps before them.
      attention: of `jax.nn.dot_product_attention`, for "staged" and "hbm-jax".
      hbm_limit_gb: device memory the process may use, in 10^9 bytes; all of it when None.
    """

    shape: str
    placement: str
    batch: int
    length: int
    layers: int | None = None
    steps: int = 10
    warmup: int = 3
    attention: str = "auto"
    hbm_limit_gb: float | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The shape under Hugging Face's names, with the number of layers asked for."""
        config = dict(SHAPES[self.shape])
        config["num_hidden_layers"] = self.layers or config["num_hidden_layers"]
        return config

    @property
    def label(self) -> str:
        """A short name for people."""
        layers = self.config["num_hidden_layers"]
        return f"{self.shape} L={layers} {self.placement} B={self.batch} S={self.length}"

    @property
    def capacity(self) -> int:
        """Tokens a row needs room for."""
        return self.length + self.warmup + self.steps

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        config = self.config
        heads = config["num_key_value_heads"] * config["head_dim"]
        return 2 * heads * config["num_hidden_layers"] * ITEMSIZE

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache, before rounding to pages."""
        return self.batch * self.capacity * self.bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """Bytes of cached keys and values a step must read, at the middle of the timed steps."""
        return self.batch * (self.length + self.warmup + self.steps // 2) * self.bytes_per_token

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return self._parameters() * ITEMSIZE

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters a step reads: all but an embedding used only to look up B rows."""
        config = self.config
        embedding = 0 if config["tie_word_embeddings"] else _embedding(config)
        return (self._parameters() - embedding) * ITEMSIZE

    def _parameters(self) -> int:
        c = self.config
        width, inner = c["hidden_size"], c["intermediate_size"]
        queries = c["num_attention_heads"] * c["head_dim"]
        keys = c["num_key_value_heads"] * c["head_dim"]
        layer = 2 * width * (queries + keys) + 3 * width * inner + 2 * width
        tables = 1 if c["tie_word_embeddings"] else 2
        return c["num_hidden_layers"] * layer + tables * _embedding(c) + width

    def row(self) -> dict[str, Any]:
        """The row of this case with every figure still null."""
        config = self.config
        return {
            "shape": self.shape,
            "placement": self.placement,
            "batch": self.batch,
            "length": self.length,
            "layers": config["num_hidden_layers"],
            "num_query_heads": config["num_attention_heads"],
            "num_kv_heads": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
            "dtype": "bfloat16",
            "steps": self.steps,
            "hbm_limit_gb": self.hbm_limit_gb,
            "kv_bytes": self.kv_bytes,
            "weight_bytes": self.weight_bytes,
            "parameter_bytes": self.parameter_bytes,
            **dict.fromkeys(FIGURES),
        }


FIGURES = (
    "implementation", "ms_per_step", "ms_all", "tokens_per_s", "link_gb_per_s",
    "share_of_zero_copy_peak", "bound_ms", "ratio_to_bound", "hbm_peak_bytes", "hbm_temp_bytes",
    "host_bytes", "kv_bytes_device", "finite_logits", "notes", "error",
)  # fmt: skip


def _embedding(config: dict[str, Any]) -> int:
    return config["vocab_size"] * config["hidden_size"]


# Lists are swept. What is not given falls back to the defaults of `Case`.
PRESETS: dict[str, dict[str, Any]] = {
    "reach": {"shape": ["llama-8b"], "batch": [4], "length": [32768]},
    # As on a GPU of 24 GB, where what keeps the cache in its memory comes to its end.
    "context": {
        "shape": ["llama-8b"],
        "batch": [1],
        "length": [8192, 32768, 131072, 524288],
        "hbm_limit": 24.0,
    },
    "quick": {"shape": ["test"], "batch": [2], "length": [200], "steps": 3},
}


def expand(
    shapes: Sequence[str],
    batches: Sequence[int],
    lengths: Sequence[int],
    placements: Sequence[str],
    **options: Any,
) -> list[Case]:
    """All combinations, placements innermost; `options` are fields of `Case`."""
    for name, values in (("--batch", batches), ("--length", lengths)):
        if min(values) < 1:
            raise ValueError(f"`{name}` should be positive, but got {min(values)}.")
    return [
        Case(shape, placement, batch, length, **options)
        for shape, batch, length, placement in itertools.product(
            shapes, batches, lengths, placements
        )
    ]


def reduce_to(cases: Sequence[Case], host_bytes: int) -> list[Case]:
    """The same cases with as many layers as let the largest host cache take `host_bytes`.

    Raises:
      ValueError: not even one layer fits.
    """
    hosted = [case for case in cases if case.placement in IN_HOST_MEMORY]
    if not hosted:
        return list(cases)
    largest = max(hosted, key=lambda case: case.cache_bytes)
    layers = largest.config["num_hidden_layers"]
    fitting = min(layers, host_bytes * layers // largest.cache_bytes)
    if fitting < 1:
        raise ValueError(
            f"One layer of S={largest.length} needs {largest.cache_bytes / layers / 2**30:.1f} GiB "
            f"of host memory, and {host_bytes / 2**30:.1f} GiB can be used. Reduce --length."
        )
    if fitting == layers:
        return list(cases)
    return [dataclasses.replace(case, layers=fitting) for case in cases]
