"""A case of `directkv bench attention`: its sizes, and the row it becomes. Touches no JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

OURS = ("cuda", "cpu", "xla", "reference")  # read the paged cache
BASELINES = ("naive", "staged", "cudnn", "jax-xla", "pallas")  # read token-major keys and values
IMPLEMENTATIONS = OURS + BASELINES
PLACEMENTS = ("host", "device")
ONLY_IN = {"staged": "host", "cudnn": "device", "jax-xla": "device", "pallas": "device"}
PAGE_SIZE = 64
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the result.

    Attributes:
      placement: where keys and values lie: "host" or "device".
      implementation: one of `IMPLEMENTATIONS`.
      lengths: cached tokens of each row; B of them.
      query_heads: N.
      kv_heads: K.
      head_dim: H.
      dtype: of queries, keys and values.
      query_tokens: T, new tokens of each row.
      num_ctas: thread blocks of the CUDA kernel; None: it chooses.
      layers: L, calls timed together, each on its own layer; the time is that of one.
      appends: each call also appends the new tokens (`decode_attention` instead of `attend`).
      shuffled: the pages of a row lie in random order, as in a pool that has been in use.
    """

    placement: str
    implementation: str
    lengths: tuple[int, ...]
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    query_tokens: int = 1
    num_ctas: int | None = None
    layers: int = 1
    appends: bool = False
    shuffled: bool = True

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def ragged(self) -> bool:
        """Whether the rows differ in length."""
        return len(set(self.lengths)) > 1

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes that one call has to read: the cached tokens of one layer."""
        return sum(self.lengths) * self.token_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of one call: those over cached tokens, 4 H for each pair."""
        return 4 * self.query_tokens * self.query_heads * self.head_dim * sum(self.lengths)

    @property
    def row_pages(self) -> int:
        """Pages the longest row needs, its new tokens included."""
        return math.ceil((self.max_length + self.query_tokens) / PAGE_SIZE)

    @property
    def pages(self) -> int:
        """Pages all rows need: each has those of its own length."""
        return sum(math.ceil((n + self.query_tokens) / PAGE_SIZE) for n in self.lengths)

    @property
    def storage_bytes(self) -> int:
        """Bytes of keys and values the case keeps, all layers, padded rows where they are dense."""
        if self.implementation in OURS:
            return self.layers * self.pages * PAGE_SIZE * self.token_bytes
        return self.layers * self.batch * self.max_length * self.token_bytes

    @property
    def label(self) -> str:
        """A short name for people."""
        span = f"{min(self.lengths)}..{self.max_length}" if self.ragged else f"{self.max_length}"
        extra = [
            f"T={self.query_tokens}" if self.query_tokens > 1 else "",
            f"ctas={self.num_ctas}" if self.num_ctas else "",
            f"L={self.layers}" if self.layers > 1 else "",
            "append+attend" if self.appends else "",
        ]
        shape = f"{self.query_heads}/{self.kv_heads}x{self.head_dim} {self.dtype}"
        words = (self.placement, self.implementation, f"B={self.batch} S={span}", shape, *extra)
        return " ".join(filter(None, words))

    def row(self) -> dict[str, Any]:
        """The row of this case with every figure still null."""
        return {
            "implementation": self.implementation,
            "placement": self.placement,
            "batch": self.batch,
            "length": None if self.ragged else self.max_length,
            "lengths": list(self.lengths) if self.ragged else None,
            "ragged": self.ragged,
            "num_query_heads": self.query_heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "query_tokens": self.query_tokens,
            "num_ctas": self.num_ctas,
            "layers": self.layers,
            "appends": self.appends,
            "shuffled": self.shuffled if self.implementation in OURS else None,
            "kv_bytes": self.kv_bytes,
            **dict.fromkeys(FIGURES),
        }

    def to_json(self) -> dict[str, Any]:
        """The case for another process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """The inverse of `to_json`."""
        return cls(**{**fields, "lengths": tuple(fields["lengths"])})


FIGURES = (
    "us", "us_all", "gb_per_s", "tflop_per_s", "share_of_zero_copy_peak", "share_of_copy_engine",
    "share_of_hbm_peak", "link_bytes", "hbm_temp_bytes", "max_abs_error", "relative_error",
    "error", "note",
)  # fmt: skip
