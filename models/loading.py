"""`load`: a model and its tokenizer from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp

from directkv_jax.models.checkpoint import Checkpoint, build
from directkv_jax.models.tokenizer import Tokenizer
from directkv_jax.models.transformer import Transformer


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
    checkpoint = _open(Path(path))
    rows, known = checkpoint.config.vocab_size, checkpoint.tokenizer.vocab_size
    if known > rows:
        raise ValueError(
            f"{path}: the tokenizer knows {known} tokens, but the embedding has {rows} rows. "
            "Check that the files belong together."
        )
    return build(checkpoint, dtype, progress=progress), checkpoint.tokenizer


def _open(path: Path) -> Checkpoint:
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
            from directkv_jax.models.hf import open_folder

            return open_folder(path)
        from directkv_jax.models.gguf import open_gguf

        return open_gguf(path)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"loading models needs the package `{error.name}`. Install it with: "
            'pip install "directkv-jax[models]"'
        ) from error
