"""Rebuilds a byte-level BPE tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from directkv_jax.models.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type

# The pattern of Llama 3, which its GGUF files name "llama-bpe".
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys describe.

    Raises:
      ValueError: keys are missing or describe a kind of tokenizer this cannot rebuild.
    """
    import tokenizers
    from tokenizers import decoders, models

    if (kind := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise ValueError(
            f'`tokenizer.ggml.model` should be "gpt2" (byte-level BPE), but got {kind!r}. '
            "Load the model from its Hugging Face folder."
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if not metadata.get(key):
            raise ValueError(f"the metadata lacks `{key}`.")
    tokens = metadata["tokenizer.ggml.tokens"]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        bpe = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the tokenizer of the file is inconsistent: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, tokens, metadata.get("tokenizer.ggml.token_type"))

    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        _prepend(backend, tokens[bos], bos)
    ends = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = [metadata[key] for name in ends if (key := f"tokenizer.ggml.{name}") in metadata]
    special = {
        f"{name}_token": tokens[metadata[key]]
        for name in ("bos", "eos")
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, bos, tuple(dict.fromkeys(eos)), template, special)


def _pre_tokenizer(name: str):
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if name == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if name == "llama-bpe":
        split = Split(Regex(_LLAMA3), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ValueError(
        f'`tokenizer.ggml.pre` should be "smollm", "llama-bpe" or "gpt-2", but got {name!r}. '
        "Load the model from its Hugging Face folder."
    )


def _add_special(backend, tokens: list[str], types: list[int] | None) -> None:
    from tokenizers import AddedToken

    types = types or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(
            f"`tokenizer.ggml.token_type` should hold {len(tokens)} entries, but got {len(types)}."
        )
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    user = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in user])


def _prepend(backend, token: str, index: int) -> None:
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, index)]
    )
