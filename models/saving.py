"""The cache of a model in a file, with the tokens it is of."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from directkv_jax import saving
from directkv_jax._saved import Saved
from directkv_jax.models.cache import ModelCache
from directkv_jax.models.transformer import Transformer

_SAMPLES = 64  # elements of a weight that the fingerprint of a model takes in
_GIVEN = "given."  # before the names of the caller's metadata: the file has some of its own


def save(
    path: str | os.PathLike, cache: ModelCache, model: Transformer, tokens: Sequence[int],
    metadata: Mapping[str, str],
) -> None:  # fmt: skip
    """Writes a cache of one row.

    Args:
      path: of the file; replaced if it exists.
      cache: of one row. What it holds beyond `tokens` is not meant.
      model: whose keys and values they are.
      tokens: that the row holds.
      metadata: texts to keep beside them.

    Raises:
      TypeError: metadata that are no texts.
      ValueError: the cache was donated away or deleted.
      OSError: the file cannot be written.
    """
    caches = {f"part{index}": part for index, part in enumerate(cache.parts)}
    saving.check_metadata(metadata)
    given = {f"{_GIVEN}{name}": text for name, text in metadata.items()}
    saving.save(
        path, caches, {**given, "model": fingerprint(model)},
        {"tokens": np.asarray(tokens, np.int32)},
    )  # fmt: skip


def load(
    path: str | os.PathLike, model: Transformer, *, max_length: int | None = None,
    placement: str | None = None,
) -> tuple[ModelCache, tuple[int, ...], dict[str, str]]:  # fmt: skip
    """(the cache, the tokens it holds, the metadata).

    Args:
      path: of the file.
      model: the same model as when it was saved.
      max_length: tokens the row can hold; None: as many as before.
      placement: of the layers that keep all tokens; None: where they were.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged or of another model, or the RoPE of the model depends on the
        length of the cache and would be another.
      MemoryError: the memory for the cache cannot be had.
    """
    saved = Saved(path)
    if saved.metadata.get("model") != fingerprint(model):
        raise ValueError(
            f"{path} holds keys and values of another model, or of the same one in another dtype. "
            "Load the model that it was saved with."
        )
    descriptions = [saved.description(f"part{index}") for index in range(len(model.config.parts))]
    before = descriptions[0]["max_length"]
    _check_rope(model, before, max_length or before)
    tokens = _tokens(saved, model, descriptions)
    parts = [
        saved.load(
            f"part{index}", max_length=max_length,
            placement=placement if known["window"] is None else None,
        )
        for index, known in enumerate(descriptions)
    ]  # fmt: skip
    cache = ModelCache(tuple(parts))
    # A window also keeps what was taken back; the row is as long as its tokens.
    given = {
        name.removeprefix(_GIVEN): text
        for name, text in saved.metadata.items()
        if name.startswith(_GIVEN)
    }
    return cache.truncate(len(tokens)), tokens, given


def _tokens(
    saved: Saved, model: Transformer, descriptions: Sequence[Mapping[str, Any]]
) -> tuple[int, ...]:
    """Those of the row, once it is sure that every part of the cache has them."""
    tokens = tuple(saved.array("tokens").tolist())
    if not all(0 <= token < model.config.vocab_size for token in tokens):
        raise saved.damaged("it holds tokens that the model does not know")
    for index, (part, known) in enumerate(zip(model.config.parts, descriptions, strict=True)):
        shapes = dataclasses.asdict(part)
        if known["window"] is None:  # no shorter than a row
            del shapes["window"]
        if any(known[name] != value for name, value in shapes.items()):
            raise saved.damaged(f"`part{index}` should be of {part}, but is of {known}")
        if int(saved.array(f"part{index}.lengths", length=1)[0]) < len(tokens):
            raise saved.damaged(f"`part{index}` holds fewer than its {len(tokens)} tokens")
    return tokens


def _check_rope(model: Transformer, before: int, after: int) -> None:
    for layer in model.config.layers:
        if layer.rope is None:
            continue
        old, new = (layer.rope.resolve(layer.head_dim, length) for length in (before, after))
        if old != new:
            raise ValueError(
                f"The RoPE of this model depends on the length of the cache, and the saved keys "
                f"are for {before} tokens. Load them with max_length={before}."
            )


def fingerprint(model: Transformer) -> str:
    """What tells models apart whose caches look alike: constants, and samples of all weights."""
    config = dataclasses.replace(model.config, bos_token_id=None, eos_token_id=())  # of texts
    digest = hashlib.sha256(repr((config, model.dtype.name)).encode())
    samples = []
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = variable.get_value()
        at = np.linspace(0, array.size - 1, _SAMPLES).astype(np.int64)
        samples.append(array[np.unravel_index(at, array.shape)])
    for sample in jax.device_get(samples):
        digest.update(np.asarray(sample).tobytes())
    return digest.hexdigest()
