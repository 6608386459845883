"""The reading half of `saving`: what a file says is checked before memory is taken for a cache."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from directkv_jax import saving
from directkv_jax._pages import write_pages

if TYPE_CHECKING:
    from directkv_jax.cache import KVCache

# What the description of a cache holds, as `saving` wrote it.
_DESCRIBED = {
    **dict.fromkeys(saving.GEOMETRY, (int,)),
    "dtype": (str,), "placement": (str,), "window": (int, type(None)), "rollback": (int,),
}  # fmt: skip


class Saved:
    """An opened file: what it says is checked before anything is allocated.

    Args:
      path: of the file.

    Raises:
      FileNotFoundError: it does not exist.
      ValueError: it is damaged, or something else.
      ImportError: safetensors is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            import safetensors
        except ImportError as error:
            raise ImportError("Loading a cache needs `safetensors`: pip install safetensors") from (
                error
            )
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path} should be a saved cache, but does not exist.")
        try:
            self._file = safetensors.safe_open(str(path), framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} should be a saved cache, but is truncated, damaged or of another kind "
                f"({error})."
            ) from error
        self.metadata: dict[str, str] = dict(self._file.metadata() or {})
        if (kind := self.metadata.get("format")) != saving.FORMAT:
            raise ValueError(f'{path} should have the format "{saving.FORMAT}", but has {kind!r}.')

    def array(self, name: str, dtype: str = "int32", length: int | None = None) -> np.ndarray:
        """A small array of one dimension.

        Args:
          name: of the array.
          dtype: that it should have.
          length: that it should have; None: any.

        Raises:
          ValueError: there is none, or of another kind.
        """
        view, kind = self._tensor(name), saving.DTYPES[dtype]
        (got, shape) = view.get_dtype(), tuple(view.get_shape())
        if got != kind or len(shape) != 1 or length not in (None, *shape):
            raise self.damaged(
                f"`{name}` should be {kind}[{'?' if length is None else length}], "
                f"but is {got}{list(shape)}"
            )
        return self._file.get_tensor(name)

    def description(self, name: str) -> dict[str, Any]:
        """Geometry, dtype, placement and window of a cache.

        Raises:
          ValueError: there is none, or it is damaged.
        """
        if name not in self.metadata:
            raise ValueError(f"{self.path} holds no cache `{name}`.")
        try:
            known = json.loads(self.metadata[name])
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"the description of `{name}` is no JSON: {error}") from error
        if not isinstance(known, dict):
            raise self.damaged(f"the description of `{name}` is {known!r:.80}")
        for key, kinds in _DESCRIBED.items():
            if type(known.get(key)) not in kinds:  # a bool is no int here
                raise self.damaged(f"of `{name}`, `{key}` is {known.get(key)!r:.80}")
        return known

    def load(
        self, name: str, *, max_length: int | None = None, placement: str | None = None
    ) -> KVCache:
        """A cache with the tokens that were saved, in pages of its own.

        Args:
          name: of the cache.
          max_length: tokens a row can hold; None: as many as before.
          placement: "host" or "device"; None: where it was.

        Raises:
          ValueError: the file is damaged, or the rows are longer than `max_length`.
          MemoryError: the memory cannot be had.
        """
        from directkv_jax.cache import KVCache

        known = self.description(name)
        lengths = self.array(f"{name}.lengths")
        batch = len(lengths)
        overflowed = self.array(f"{name}.overflowed", "bool", batch)
        written = lengths
        if known["window"] is not None:
            written = self.array(f"{name}.written", length=batch)
        max_length = known["max_length"] if max_length is None else max_length
        placement = known["placement"] if placement is None else placement
        create = functools.partial(
            KVCache.create, batch, max_length, num_kv_heads=known["num_kv_heads"],
            head_dim=known["head_dim"], num_layers=known["num_layers"], dtype=known["dtype"],
            page_size=known["page_size"], placement=placement,
            window=known["window"], rollback=known["rollback"],
        )  # fmt: skip
        try:
            shape = jax.eval_shape(create)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: {error}") from error
        if written.max() > shape.max_length:
            raise ValueError(
                f"`max_length` should be at least the {written.max()} tokens of a row in "
                f"{self.path}, but got {max_length}."
            )
        if (lengths < 0).any() or (lengths > written).any():
            raise self.damaged(f"the rows of `{name}` have {lengths.tolist()} tokens")
        counts = saving.held_pages(shape, written)
        self._check_pages(name, shape, sum(counts))

        cache = create()
        table = np.asarray(cache.page_table)
        ids = np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
        cache = self._fill(cache, name, ids.astype(np.int32))

        def beside(like: jax.Array, values: np.ndarray) -> jax.Array:
            return jax.device_put(values, like.sharding)

        return cache.replace(
            lengths=beside(cache.lengths, lengths),
            overflowed=beside(cache.overflowed, overflowed),
            written=None if cache.written is None else beside(cache.written, written),
        )

    def damaged(self, problem: str) -> ValueError:
        """The error that says so."""
        return ValueError(f"{self.path} is damaged: {problem}.")

    def _tensor(self, name: str):
        if name not in self._file.keys():  # noqa: SIM118  # it is no mapping
            raise self.damaged(f"it lacks `{name}`")
        return self._file.get_slice(name)

    def _check_pages(self, name: str, cache: KVCache, count: int) -> None:
        pages, kind = self._tensor(f"{name}.pages"), saving.DTYPES[cache.dtype.name]
        expected, got = (count, *saving.page_shape(cache)), tuple(pages.get_shape())
        if (pages.get_dtype(), got) != (kind, expected):
            raise self.damaged(
                f"`{name}.pages` should be {kind}{list(expected)}, "
                f"but is {pages.get_dtype()}{list(got)}"
            )

    def _fill(self, cache: KVCache, name: str, ids: np.ndarray) -> KVCache:
        pages, size = self._tensor(f"{name}.pages"), saving.piece_size(cache)
        for start in range(0, len(ids), size):
            piece = np.zeros((size, *saving.page_shape(cache)), cache.dtype)
            data = pages[start : min(start + size, len(ids))]
            piece[: len(data)] = data
            where = np.full(size, -1, np.int32)
            where[: len(data)] = ids[start : start + size]
            cache = _write(cache, piece, where)
        return cache


@functools.partial(jax.jit, donate_argnames="cache")
def _write(cache: KVCache, data, ids) -> KVCache:
    return cache.replace(pages=write_pages(cache, data, ids))
