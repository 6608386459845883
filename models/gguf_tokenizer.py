"""Rebuilds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from directkv_jax.models.gguf_vocabulary import CONTROL, KINDS, NORMAL, SPACE, USER_DEFINED
from directkv_jax.models.kinds import FLAG, INDEX, INTS, NUMBERS, TEXT, TEXTS, Kind, check_all
from directkv_jax.models.tokenizer import Tokenizer

_CHECKED: dict[str, Kind] = {
    **{f"tokenizer.ggml.{name}": kind for name, kind in {
        "model": TEXT, "pre": TEXT, "tokens": TEXTS, "merges": TEXTS, "token_type": INTS,
        "scores": NUMBERS, "add_bos_token": FLAG, "add_space_prefix": FLAG,
    }.items()},
    "tokenizer.chat_template": TEXT,
}  # fmt: skip

# Tokens that end an answer, though files name another one as the end of a text.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def tokenizer_from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys describe.

    Raises:
      ValueError: keys are missing or describe a kind of tokenizer this cannot rebuild.
    """
    check_all(_CHECKED, metadata)
    if (kind := metadata.get("tokenizer.ggml.model")) not in KINDS:
        raise ValueError(
            f"`tokenizer.ggml.model` should be one of {', '.join(KINDS)}, but got {kind!r}. "
            "Load the model from its Hugging Face folder."
        )
    if not metadata.get("tokenizer.ggml.tokens"):
        raise ValueError("the metadata lacks `tokenizer.ggml.tokens`.")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(
            f"`tokenizer.ggml.token_type` should hold {len(tokens)} entries, but got {len(types)}."
        )
    if kind == "llama":  # tokens that are found in the text itself, where a space is a space
        tokens = [
            token.replace(SPACE, " ") if each == USER_DEFINED else token
            for token, each in zip(tokens, types, strict=True)
        ]
    try:
        backend, starts = KINDS[kind](metadata, tokens)
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the tokenizer of the file is inconsistent: {error}") from error
    _add_special(backend, tokens, types)

    ids = {
        name: _id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
    bos = ids.get("bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", starts):
        _prepend(backend, tokens[bos], bos)
    named = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends = [index for index, token in enumerate(tokens) if token in _ENDS]
    special = {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos") if name in ids}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, bos, tuple(dict.fromkeys(named + ends)), template, special)


def _id(metadata: dict[str, Any], key: str, count: int) -> int:
    if (index := INDEX.check(key, metadata[key])) >= count:
        raise ValueError(f"`{key}` should be one of {count} tokens, but got {index}.")
    return index


def _add_special(backend, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    user = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in user])


def _prepend(backend, token: str, index: int) -> None:
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, index)]
    )
