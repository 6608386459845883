"""Caches in files: what their rows hold, as safetensors, written and read piece by piece.

Of a cache `name` a file has `name.lengths` (int32 `[B]`, tokens of each row), `name.overflowed`
(bool `[B]`), of a window `name.written` (int32 `[B]`, tokens before any were taken back), and
`name.pages` `[n, L, K, E]`: the pages of row after row. Rows that share pages have one each.
Neither saving nor loading holds more than `PIECE_BYTES` of pages outside the cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from directkv_jax import _checks
from directkv_jax._layout import pages_for
from directkv_jax._pages import jitted_read_pages
from directkv_jax._platform import any_tracer

if TYPE_CHECKING:
    from directkv_jax.cache import KVCache

FORMAT = "directkv_jax cache 1"
PIECE_BYTES = 64 << 20
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32", "bool": "BOOL"}
GEOMETRY = ("page_size", "num_kv_heads", "head_dim", "num_layers", "max_length")


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
      TypeError: metadata that are no texts.
      ValueError: a cache was donated away, is traced, or has no rows.
      NotImplementedError: its batch is split over a mesh.
      OSError: the file cannot be written.
    """
    check_metadata(metadata)
    ids = {name: _page_ids(cache) for name, cache in caches.items()}
    small: dict[str, np.ndarray] = {k: np.asarray(v, np.int32) for k, v in (arrays or {}).items()}
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    described = {**metadata, "format": FORMAT}
    for name, cache in caches.items():
        small |= {
            f"{name}.lengths": np.asarray(cache.lengths),
            f"{name}.overflowed": np.asarray(cache.overflowed),
        }
        if cache.written is not None:
            small[f"{name}.written"] = np.asarray(cache.written)
        shapes[f"{name}.pages"] = (cache.dtype, (len(ids[name]), *page_shape(cache)))
        described[name] = json.dumps(_description(cache))
    shapes = {name: (array.dtype, array.shape) for name, array in small.items()} | shapes
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} should be the name of a file, but is a folder.")
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(_header(shapes, described))
            for array in small.values():
                file.write(np.ascontiguousarray(array).tobytes())
            for name, cache in caches.items():
                for piece in _pieces(cache, ids[name]):
                    file.write(piece.tobytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises TypeError unless they are texts by name, which UTF-8 can hold."""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the metadata should be a mapping, but got {metadata!r:.80}.")
    for name, text in metadata.items():
        try:
            "".join((name, text)).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise TypeError(
                f"the metadata should be texts, but got {name!r:.80}: {text!r:.80}."
            ) from error


def held_pages(cache: KVCache, written: np.ndarray) -> list[int]:
    """How many pages of each row hold its tokens, int32 `[B]`: of a ring, at most the whole one."""
    return [pages_for(min(int(n), cache.kept_length), cache.page_size) for n in written]


def _page_ids(cache: KVCache) -> np.ndarray:
    """The ids of these pages, row after row."""
    if any_tracer(cache):
        raise ValueError("A cache is saved outside of jit; here it is traced.")
    _checks.check_cache(cache)
    if cache.batch == 0:
        raise ValueError("A cache without rows cannot be saved.")
    if cache.batch_axis is not None:
        raise NotImplementedError("A cache whose batch is split over a mesh cannot be saved.")
    written = cache.lengths if cache.written is None else cache.written
    counts = held_pages(cache, np.asarray(written))
    table = np.asarray(cache.page_table)
    return np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])


def _description(cache: KVCache) -> dict[str, Any]:
    return {
        **{name: getattr(cache, name) for name in GEOMETRY},
        "dtype": cache.dtype.name, "placement": cache.placement, "window": cache.window,
        "rollback": cache.rollback,
    }  # fmt: skip


def page_shape(cache: KVCache) -> tuple[int, int, int]:
    """`[L, K, E]`: a page of all layers, as a file holds it."""
    return cache.num_layers, cache.num_kv_heads, cache.layout.tile_elements


def _header(shapes: Mapping[str, tuple], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with: the length of a JSON object, and the object."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return len(text).to_bytes(8, "little") + text


def piece_size(cache: KVCache) -> int:
    """How many pages are on their way at once."""
    return max(1, PIECE_BYTES // (cache.num_layers * cache.layout.page_bytes))


def _pieces(cache: KVCache, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Whole pages `[n, L, K, E]`, some at a time; one program reads them all."""
    size = piece_size(cache)
    for start in range(0, len(ids), size):
        wanted = np.full(size, -1, np.int32)
        part = ids[start : start + size]
        wanted[: len(part)] = part
        yield np.asarray(jitted_read_pages(cache, wanted))[: len(part)]
