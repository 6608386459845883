"""The cache of a whole model: one `KVCache` for each kind of layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax import KVCache
from directkv_jax._layout import check_page_size
from directkv_jax.models.config import ModelConfig, Part


@functools.partial(jax.tree_util.register_dataclass, data_fields=("parts",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class ModelCache:
    """Keys and values of layers that need not be alike. Donate it, and only it, as a `KVCache`.

    Its rows hold the same tokens in every part, so the methods are those of `KVCache`, called for
    each of them.

    Attributes:
      parts: a cache for each of `ModelConfig.parts`. Those of a sliding window keep the window.
    """

    parts: tuple[KVCache, ...]

    @classmethod
    def create(
        cls, config: ModelConfig, batch: int, max_length: int, *, dtype, placement: str = "host",
        window_placement: str = "device", page_size: int = 64, rollback: int = 0, **options,
    ) -> ModelCache:  # fmt: skip
        """Allocates an empty cache.

        Args:
          config: of the model.
          batch: B, rows.
          max_length: tokens each row can hold.
          dtype: of keys and values.
          placement: "host" or "device": where the layers lie that keep all tokens.
          window_placement: the same of those that keep a window, which does not grow. A window that
            is no shorter than a row is none.
          page_size: tokens per page.
          rollback: how many tokens `truncate` may take back.
          **options: of `KVCache.create`.

        Raises:
          ValueError, TypeError, MemoryError: as `KVCache.create`.
        """
        check_page_size(page_size)
        options["page_size"] = page_size

        def create(part: Part) -> KVCache:
            kept: dict[str, Any] = {"placement": placement}
            if part.keeps_window(max_length, page_size, rollback):
                kept = {
                    "placement": window_placement, "window": part.window, "rollback": rollback
                }  # fmt: skip
            return KVCache.create(
                batch, max_length, num_kv_heads=part.num_kv_heads, head_dim=part.head_dim,
                num_layers=part.num_layers, dtype=dtype, **kept, **options,
            )  # fmt: skip

        return cls(tuple(map(create, config.parts)))

    @property
    def lengths(self) -> jax.Array:
        """int32 `[B]`, tokens in the cache."""
        return self.parts[0].lengths

    @property
    def overflowed(self) -> jax.Array:
        """bool `[B]`, rows that were given tokens that did not fit."""
        return functools.reduce(jnp.logical_or, (part.overflowed for part in self.parts))

    @property
    def batch(self) -> int:
        """B: rows."""
        return self.parts[0].batch

    @property
    def max_length(self) -> int:
        """Tokens a row can hold."""
        return self.parts[0].max_length

    @property
    def num_layers(self) -> int:
        """L, over all parts."""
        return sum(part.num_layers for part in self.parts)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of keys and values."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.host_bytes + self.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of keys and values in host memory."""
        return sum(part.host_bytes for part in self.parts)

    @property
    def device_bytes(self) -> int:
        """Bytes of keys and values in device memory."""
        return sum(part.device_bytes for part in self.parts)

    def advance(self, n) -> ModelCache:
        """As `KVCache.advance`."""
        overflowed = self.overflowed  # a row that one part refused goes on in none
        return ModelCache(
            tuple(part.replace(overflowed=overflowed).advance(n) for part in self.parts)
        )

    def truncate(self, lengths) -> ModelCache:
        """As `KVCache.truncate`."""
        return ModelCache(tuple(part.truncate(lengths) for part in self.parts))

    def take_rows(self, rows) -> ModelCache:
        """As `KVCache.take_rows`."""
        return ModelCache(tuple(part.take_rows(rows) for part in self.parts))

    def reset(self, rows=None) -> ModelCache:
        """As `KVCache.reset`."""
        return ModelCache(tuple(part.reset(rows) for part in self.parts))

    def empty_like(self) -> ModelCache:
        """Allocates an empty cache of the same sizes, also where this one is deleted."""

        def create(part: KVCache) -> KVCache:
            layout = part.layout
            return KVCache.create(
                part.batch, part.max_length, num_kv_heads=layout.num_kv_heads,
                head_dim=layout.head_dim, num_layers=part.num_layers, dtype=layout.dtype,
                page_size=layout.page_size, placement=part.placement, window=part.window,
                rollback=part.rollback, mesh=part.mesh, kv_head_axis=part.kv_head_axis,
                batch_axis=part.batch_axis,
            )  # fmt: skip

        return ModelCache(tuple(map(create, self.parts)))

    def is_deleted(self) -> bool:
        """Whether its memory was freed or donated away."""
        return any(array.is_deleted() for array in jax.tree.leaves(self))

    def delete(self) -> None:
        """Frees the memory at once. Using the cache afterwards is an error."""
        for part in self.parts:
            part.delete()


def part_of(cache, part: int):
    """What attention is given of a cache: a part of a `ModelCache`; anything else is its own part.

    Raises:
      ValueError: a lone `KVCache` for a model with several kinds of layers.
    """
    if isinstance(cache, ModelCache):
        return cache.parts[part]
    if part and isinstance(cache, KVCache):
        raise ValueError(
            "The layers of this model are of several kinds, which one KVCache cannot hold. Create "
            "the cache with `model.create_cache`."
        )
    return cache


def with_part(cache, part: int, new):
    """`cache` with that part exchanged."""
    if isinstance(cache, ModelCache):
        return ModelCache((*cache.parts[:part], new, *cache.parts[part + 1 :]))
    return new
