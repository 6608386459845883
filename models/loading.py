"""`load`: a model and its tokenizer from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from directkv_jax._layout import DTYPES
from directkv_jax.models.checkpoint import Checkpoint, build
from directkv_jax.models.config import ModelConfig
from directkv_jax.models.tokenizer import Tokenizer
from directkv_jax.models.transformer import Transformer

T = TypeVar("T")


def load(
    path: str | os.PathLike, dtype=None, *, progress: bool = True
) -> tuple[Transformer, Tokenizer]:
    """Loads a model of a known family. Nothing is unpickled and no code of the checkpoint is run.

    Args:
      path: a folder with `config.json`, `model.safetensors` (or its sharded index) and
        `tokenizer.json`, or a `.gguf` file.
      dtype: of the parameters, activations and the cache: float32, bfloat16 or float16. None takes
        float32 on a CPU and bfloat16 elsewhere, whatever the file holds.
      progress: whether to show a bar on stderr, if that is a terminal.

    Returns:
      (model, tokenizer).

    Raises:
      FileNotFoundError: the path or one of its files does not exist.
      ValueError: a file is truncated, mislabelled or for another architecture, or keys or shapes do
        not fit the configuration (all of them in one message).
      ImportError: the `models` extra is not installed.

    Example::

      model, tokenizer = load("SmolLM2-135M-Instruct")
      print(generate(model, tokenizer, "The capital of France is", max_new_tokens=8))
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    _check_dtype(dtype)
    checkpoint = _open(Path(path))
    _check_vocabulary(path, checkpoint)
    return build(checkpoint, dtype, progress=progress), checkpoint.tokenizer


def _check_dtype(dtype) -> None:
    with contextlib.suppress(TypeError):
        if jnp.dtype(dtype).name in DTYPES:
            return
    raise ValueError(f"`dtype` should be one of {', '.join(DTYPES)}, but got {dtype!r}.")


def _check_vocabulary(path: str | os.PathLike, checkpoint: Checkpoint) -> None:
    """Every token has a row in the embedding; those that were added to the vocabulary need not."""
    rows, tokenizer = checkpoint.config.vocab_size, checkpoint.tokenizer
    if (known := tokenizer.vocab_size) > rows:
        raise ValueError(
            f"{path}: the tokenizer knows {known} tokens, but the embedding has {rows} rows. "
            "Check that the files belong together."
        )
    if added := [token for token, index in tokenizer.added_tokens.items() if index >= rows]:
        warnings.warn(
            f"{path}: the tokenizer adds {len(added)} tokens that the embedding has no rows for "
            f"({', '.join(added):.80}). A prompt that holds one is refused.",
            stacklevel=3,
        )


def load_config(path: str | os.PathLike) -> ModelConfig:
    """The configuration of a model: of a folder only `config.json` is read, of a GGUF no weights.

    Args:
      path: as for `load`.

    Raises:
      FileNotFoundError, ValueError, ImportError: as `load`.
    """
    path = Path(path)
    return _read(path, lambda hf: hf.open_config(path)[1], lambda gguf: gguf.open_gguf(path).config)


def _open(path: Path) -> Checkpoint:
    return _read(path, lambda hf: hf.open_folder(path), lambda gguf: gguf.open_gguf(path))


def _read(path: Path, of_folder: Callable[[Any], T], of_gguf: Callable[[Any], T]) -> T:
    """What the module of the format of `path` makes of it; imports only that."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Expected a model folder or a GGUF file.")
    if path.is_file() and path.suffix != ".gguf":
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(
                    f"{path} should be a GGUF file or a model folder, but is a file of another "
                    "kind. Pass the folder that holds `config.json`."
                )
    try:
        if path.is_dir():
            from directkv_jax.models import hf

            return of_folder(hf)
        from directkv_jax.models import gguf

        return of_gguf(gguf)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"loading models needs the package `{error.name}`. Install it with: "
            'pip install "directkv-jax[models]"'
        ) from error
