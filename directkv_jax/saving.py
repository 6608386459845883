"""Caches in files: what their rows hold, as safetensors, written and read piece by piece.

Of a cache `name` a file has `name.lengths` and `name.counts` (int32 `[B]`, tokens and pages of each
row), `name.overflowed`, and `name.pages` `[n, L, K, E]`: the pages of row after row. Rows that
share pages have one each. Neither saving nor loading holds more than `PIECE_BYTES` of pages
outside the cache.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from directkv_jax import _checks
from directkv_jax._layout import pages_for
from directkv_jax._pages import read_pages, write_pages

if TYPE_CHECKING:
    from directkv_jax.cache import KVCache

FORMAT = "directkv_jax cache 1"
PIECE_BYTES = 64 << 20
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32", "bool": "BOOL"}
_GEOMETRY = ("page_size", "num_kv_heads", "head_dim", "num_layers", "max_length")


def save(
    path: str | os.PathLike, caches: Mapping[str, KVCache], metadata: Mapping[str, str],
    arrays: Mapping[str, np.ndarray] | None = None,
) -> None:  # fmt: skip
    """Writes caches into one file, which appears when it is complete.

    Args:
      path: of the file; replaced if it exists.
      caches: by name.
      metadata: what `load` is to compare, and anything else.
      arrays: more to keep, int32, by name.

    Raises:
      ValueError: a cache was donated away.
      NotImplementedError: its batch is split over a mesh.
      OSError: the file cannot be written.
    """
    tables = {name: _held_pages(cache) for name, cache in caches.items()}
    small: dict[str, np.ndarray] = {k: np.asarray(v, np.int32) for k, v in (arrays or {}).items()}
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    described = {**metadata, "format": FORMAT}
    for name, cache in caches.items():
        small |= {
            f"{name}.lengths": np.asarray(cache.lengths),
            f"{name}.counts": np.asarray([len(ids) for ids in tables[name]], np.int32),
            f"{name}.overflowed": np.asarray(cache.overflowed),
        }
        if cache.written is not None:
            small[f"{name}.written"] = np.asarray(cache.written)
        count = sum(map(len, tables[name]))
        shapes[f"{name}.pages"] = (cache.dtype, (count, *_page_shape(cache)))
        described[name] = json.dumps(_description(cache))
    shapes = {name: (array.dtype, array.shape) for name, array in small.items()} | shapes
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(_header(shapes, described))
            for array in small.values():
                file.write(np.ascontiguousarray(array).tobytes())
            for name, cache in caches.items():
                for piece in _pieces(cache, np.concatenate(tables[name])):
                    file.write(piece.tobytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
        if (kind := self.metadata.get("format")) != FORMAT:
            raise ValueError(f'{path} should have the format "{FORMAT}", but has {kind!r}.')

    def array(self, name: str) -> np.ndarray:
        """A small array."""
        return self._file.get_tensor(name)

    def description(self, name: str) -> dict[str, Any]:
        """Geometry, dtype, placement and window of a cache."""
        if name not in self.metadata:
            raise ValueError(f"{self.path} holds no cache `{name}`.")
        return json.loads(self.metadata[name])

    def load(
        self, name: str, *, max_length: int | None = None, placement: str | None = None
    ) -> KVCache:
        """A cache with the tokens that were saved, in pages of its own.

        Args:
          name: of the cache.
          max_length: tokens a row can hold; None: as many as before.
          placement: "host" or "device"; None: where it was.

        Raises:
          ValueError: the rows are longer than `max_length`.
          MemoryError: the memory cannot be had.
        """
        from directkv_jax.cache import KVCache

        known = self.description(name)
        lengths, counts = self.array(f"{name}.lengths"), self.array(f"{name}.counts")
        max_length = known["max_length"] if max_length is None else max_length
        if lengths.size and max_length < lengths.max():
            raise ValueError(
                f"`max_length` should be at least the {lengths.max()} tokens of a row in "
                f"{self.path}, but got {max_length}."
            )
        cache = KVCache.create(
            len(lengths), max_length, num_kv_heads=known["num_kv_heads"],
            head_dim=known["head_dim"], num_layers=known["num_layers"], dtype=known["dtype"],
            page_size=known["page_size"], placement=placement or known["placement"],
            window=known["window"], rollback=known["rollback"],
        )  # fmt: skip
        table = np.asarray(cache.page_table)
        ids = np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
        cache = self._fill(cache, name, ids.astype(np.int32))

        def beside(like: jax.Array, values: np.ndarray) -> jax.Array:
            return jax.device_put(values, like.sharding)

        written = cache.written
        return cache.replace(
            lengths=beside(cache.lengths, lengths),
            overflowed=beside(cache.overflowed, self.array(f"{name}.overflowed")),
            written=None if written is None else beside(written, self.array(f"{name}.written")),
        )

    def _fill(self, cache: KVCache, name: str, ids: np.ndarray) -> KVCache:
        pages, size = self._file.get_slice(f"{name}.pages"), _piece_size(cache)
        if tuple(pages.get_shape()) != (len(ids), *_page_shape(cache)):
            raise ValueError(
                f"{self.path} should hold {len(ids)} pages of {_page_shape(cache)} of `{name}`, "
                f"but holds {tuple(pages.get_shape())}."
            )
        for start in range(0, len(ids), size):
            piece = np.zeros((size, *_page_shape(cache)), cache.dtype)
            data = pages[start : min(start + size, len(ids))]
            piece[: len(data)] = data
            where = np.full(size, -1, np.int32)
            where[: len(data)] = ids[start : start + size]
            cache = _write(cache, piece, where)
        return cache


def _held_pages(cache: KVCache) -> list[np.ndarray]:
    """The page ids of each row, up to its last token: of a ring, at most the whole ring."""
    _checks.check_cache(cache)
    if cache.batch_axis is not None:
        raise NotImplementedError("A cache whose batch is split over a mesh cannot be saved.")
    held = np.asarray(cache.lengths if cache.written is None else cache.written)
    counts = [pages_for(min(int(n), cache.kept_length), cache.page_size) for n in held]
    table = np.asarray(cache.page_table)
    return [row[:count] for row, count in zip(table, counts, strict=True)]


def _description(cache: KVCache) -> dict[str, Any]:
    return {
        **{name: getattr(cache, name) for name in _GEOMETRY},
        "dtype": cache.dtype.name, "placement": cache.placement, "window": cache.window,
        "rollback": cache.rollback,
    }  # fmt: skip


def _page_shape(cache: KVCache) -> tuple[int, int, int]:
    return cache.num_layers, cache.num_kv_heads, cache.layout.tile_elements


def _header(shapes: Mapping[str, tuple], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with: the length of a JSON object, and the object."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return len(text).to_bytes(8, "little") + text


def _piece_size(cache: KVCache) -> int:
    return max(1, PIECE_BYTES // (cache.num_layers * cache.layout.page_bytes))


def _pieces(cache: KVCache, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Whole pages `[n, L, K, E]`, some at a time; one program reads them all."""
    size = _piece_size(cache)
    for start in range(0, len(ids), size):
        wanted = np.full(size, -1, np.int32)
        part = ids[start : start + size]
        wanted[: len(part)] = part
        yield np.asarray(_read(cache, wanted))[: len(part)]


_read = jax.jit(read_pages)


@functools.partial(jax.jit, donate_argnames="cache")
def _write(cache: KVCache, data, ids) -> KVCache:
    return cache.replace(pages=write_pages(cache, data, ids))
