"""Opens a GGUF file; quantized tensors are expanded while loading."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from directkv_jax.models.checkpoint import Checkpoint, Tensor
from directkv_jax.models.config import ModelConfig
from directkv_jax.models.gguf_architectures import Architecture
from directkv_jax.models.gguf_config import ROPE_TENSORS, Contents, read_config
from directkv_jax.models.gguf_tokenizer import tokenizer_from_metadata

MAGIC = b"GGUF"


def open_gguf(path: Path) -> Checkpoint:
    """Opens a file without expanding any weights yet.

    Raises:
      ValueError: the file is truncated, of another format or for an unknown architecture, or a
        tensor has a type that cannot be expanded.
    """
    metadata, listed = _contents(path)
    raw = {tensor.name: tensor for tensor in listed}
    # GGUF lists the fastest axis first.
    shapes = {name: tuple(map(int, reversed(each.shape))) for name, each in raw.items()}
    try:
        _check_types(listed)
        architecture, config = read_config(
            Contents(metadata, shapes, lambda name: _expand(raw[name]))
        )
        tokenizer = tokenizer_from_metadata(metadata)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{path}: {error}") from error
    tensors = {
        name: Tensor(
            shapes[name],
            functools.partial(_expand, tensor, _stored(name, architecture, config)),
        )
        for name, tensor in raw.items()
        if name not in ROPE_TENSORS
    }
    return Checkpoint(path, config, tensors, tokenizer, layout=architecture.names)


def _contents(path: Path) -> tuple[dict[str, Any], list[gguf.ReaderTensor]]:
    with path.open("rb") as file:
        if (magic := file.read(4)) != MAGIC:
            raise ValueError(
                f"{path} should start with {MAGIC!r} (GGUF), but starts with {magic!r}."
            )
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        if "GGMLQuantizationType" in str(error):  # a number that the package has no name for
            raise ValueError(
                f"{path}: a tensor has an unknown type ({error}). {_advice()}"
            ) from error
        raise ValueError(
            f"{path} should be a complete GGUF file, but is truncated or damaged ({error}). "
            "Copy or download it again."
        ) from error
    return metadata, reader.tensors


class _Reader(gguf.GGUFReader):
    """Ends with the file. Its base makes empty arrays of what lies beyond, however many."""

    def _get(self, offset, dtype, count=1, override_order=None):
        got = super()._get(offset, dtype, count, override_order)
        if len(got) < count:
            raise ValueError(f"it ends before byte {offset + count * got.itemsize}")
        return got


def _check_types(tensors: list[gguf.ReaderTensor]) -> None:
    for tensor in tensors:
        if tensor.tensor_type not in known_types():
            raise ValueError(
                f"`{tensor.name}` has the GGUF type {tensor.tensor_type.name}, which the package "
                f"`gguf` cannot expand. {_advice()}"
            )


def _advice() -> str:
    known = ", ".join(sorted(kind.name for kind in known_types()))
    return f"Take a file with types of {known}, or a later version of the package."


@functools.cache
def known_types() -> frozenset[gguf.GGMLQuantizationType]:
    """The types of tensors that the package `gguf` can expand."""

    def expands(kind) -> bool:
        try:
            gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    return frozenset(filter(expands, gguf.GGMLQuantizationType))


def _expand(tensor, restore: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return values if restore is None else restore(values)


def _stored(name: str, architecture: Architecture, config: ModelConfig):
    """What makes the values of a tensor those of Hugging Face's files, or None."""
    kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if architecture.permuted and kind in ("attn_q", "attn_k"):
        layer = config.layers[int(name.split(".")[1])]
        heads = layer.num_attention_heads if kind == "attn_q" else layer.num_key_value_heads
        return functools.partial(unpermute, heads=heads)
    if kind.endswith("_norm") and config.norm_offset:
        return lambda values: values - np.float32(config.norm_offset)  # it is added in the file
    return None


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the reordering of query and key rows in GGUF files.

    There the two rows of each rotary pair are neighbours (0, H/2, 1, H/2 + 1, ...); our rotation,
    as Hugging Face's, pairs row i with row i + H/2.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
