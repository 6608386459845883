"""What every implementation is asked, and how it answers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import numpy as np

from directkv_jax._layout import PageLayout


@dataclasses.dataclass(frozen=True)
class Request:
    """The static facts by which an implementation says whether it can serve a call."""

    platform: str
    placement: str
    dtype: np.dtype
    head_dim: int
    num_query_heads: int
    num_kv_heads: int

    @property
    def staged_by_xla(self) -> bool:
        """Whether plain JAX would have to copy the cache to the device to read it."""
        return self.placement == "host" and self.platform != "cpu"


@dataclasses.dataclass(frozen=True)
class Storage:
    """What is static about the pages one device holds. Hashable: part of the compiled program."""

    layout: PageLayout  # of this shard: num_kv_heads is the shard's
    host: bool  # placed in host memory; a kernel that finds them elsewhere refuses
    tracked: bool  # the buffer is known, so a copy of it can be refused


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of an attend call."""

    storage: Storage
    scale: float
    soft_cap: float  # 0: off
    window_left: int  # -1: off
    num_ctas: int = 0  # thread blocks of the CUDA kernel; 0: chosen from the link


class Rows(NamedTuple):
    """What says where the tokens of each row are; all of it lives on the device.

    Attributes:
      page_table: int32 `[B, max_pages]`.
      lengths: int32 `[B]`, tokens in the cache.
      seq_lengths: int32 `[B]`, how many of the T new tokens are valid.
      layer: int32 `[]`.
    """

    page_table: jax.Array
    lengths: jax.Array
    seq_lengths: jax.Array
    layer: jax.Array


class Implementation(Protocol):
    """One way to attend to, and to write, a paged cache. Pages are `[L, P, K, E]`."""

    name: str

    def unsupported_reason(self, request: Request) -> str | None:
        """Why `request` cannot be served here, or None if it can."""
        ...

    def attend(self, query, key, value, pages, rows: Rows, options: Options):
        """(out `[B, T, N, H]`, lse float32 `[B, T, N]`) of cached and fresh tokens.

        query is `[B, T, N, H]`; key and value are `[B, T, K, H]` or `[B, 0, K, H]`.
        """
        ...

    def append(self, pages, key, value, rows: Rows, storage: Storage, after):
        """`pages` with the valid new tokens written; ordered after the array `after`."""
        ...

    def read_pages(self, pages, page_ids, storage: Storage):
        """Whole pages as a device array `[n, L, K, E]`; zeros for ids out of range."""
        ...

    def write_pages(self, pages, data, page_ids, storage: Storage):
        """`pages` with whole pages `[n, L, K, E]` written; ids out of range are skipped."""
        ...
