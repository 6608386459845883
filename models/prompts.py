"""Prompts, as texts or token ids, become lists of token ids."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from directkv_jax.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Prompts = str | Sequence[str] | Sequence[Sequence[int]]


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The token ids of one prompt.

    Raises:
      TypeError: it is neither a text nor token ids.
    """
    return tokenizer.encode(prompt) if isinstance(prompt, str) else ids("prompt", prompt)


def encode_all(tokenizer: Tokenizer, prompts: Prompts) -> list[list[int]]:
    """The token ids of each prompt.

    Raises:
      TypeError: `prompts` is of another kind.
    """
    if isinstance(prompts, str):
        return [tokenizer.encode(prompts)]
    rows: list[Any] = list(prompts) if isinstance(prompts, Sequence) else []
    if rows and all(isinstance(row, str) for row in rows):
        return [tokenizer.encode(row) for row in rows]
    if rows and all(map(_is_list, rows)) and not any(isinstance(row, str) for row in rows):
        return [ids(f"prompts[{index}]", row) for index, row in enumerate(rows)]
    raise TypeError(
        "`prompts` should be a str, a non-empty list of str or a list of lists of token ids, "
        f"but got {prompts!r:.80}."
    )


def _is_list(values: Any) -> bool:
    return isinstance(values, (Sequence, np.ndarray, jax.Array)) and not isinstance(values, bytes)


def ids(name: str, values: Iterable[int]) -> list[int]:
    """`values` as a list of ints, whose range is not looked at.

    Raises:
      TypeError: they are something else; bytes, whose elements are ints, too.
    """
    if _is_list(values) and not isinstance(values, str):
        with contextlib.suppress(TypeError):
            values = np.asarray(values) if isinstance(values, jax.Array) else values
            return [operator.index(value) for value in values]
    raise TypeError(f"`{name}` should be a list of token ids, but got {values!r:.80}.")
