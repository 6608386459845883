"""The two kinds of vocabulary of GGUF files: byte-level BPE, and SentencePiece with scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
SPACE = "\u2581"  # how SentencePiece writes a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
    )


def _cased_words(digits: str, ending: str = "") -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}|{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


@dataclasses.dataclass(frozen=True)
class Splitting:
    """How a text is cut before byte-level BPE.

    Attributes:
      pattern: of the pieces, or None for that of GPT-2.
      digits: whether each digit is a piece.
      compose: whether the text is brought to Unicode's form NFC.
      whole: whether a piece that is a token is taken as it is, without merging.
      bos: whether a text starts with the token of the beginning, where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    compose: bool = False
    whole: bool = False
    bos: bool = False


# By `tokenizer.ggml.pre`.
SPLITTINGS: dict[str, Splitting] = {
    "gpt-2": Splitting(),
    "smollm": Splitting(digits=True),
    "llama-bpe": Splitting(_words(r"\p{N}{1,3}"), whole=True, bos=True),
    "smaug-bpe": Splitting(_words(r"\p{N}{1,3}")),  # SmolLM3
    "dbrx": Splitting(_words(r"\p{N}{1,3}")),  # Phi-4
    "qwen2": Splitting(_words(r"\p{N}"), compose=True),
    "gpt-4o": Splitting(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")),  # Phi-4-mini
    "tekken": Splitting(_cased_words(r"\p{N}"), whole=True, bos=True),  # Mistral NeMo
}


def byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Any, bool]:
    """A `tokenizers.Tokenizer` of a vocabulary with merges, and whether it starts with BOS.

    Raises:
      ValueError: there are no merges, or the pattern of the pieces is unknown.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if (name := metadata.get("tokenizer.ggml.pre", "default")) not in SPLITTINGS:
        raise ValueError(
            f"`tokenizer.ggml.pre` should be one of {', '.join(SPLITTINGS)}, but got {name!r}. "
            "Load the model from its Hugging Face folder."
        )
    if not metadata.get("tokenizer.ggml.merges"):
        raise ValueError("the metadata lacks `tokenizer.ggml.merges`.")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    if (single := next((merge[0] for merge in merges if len(merge) == 1), None)) is not None:
        raise ValueError(
            f"each of `tokenizer.ggml.merges` should be two tokens and a space, but one is "
            f"{single!r:.80}."
        )
    how = SPLITTINGS[name]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=how.whole,
        )
    )
    parts = [Digits(individual_digits=True)] if how.digits else []
    if how.pattern:
        parts.append(Split(Regex(how.pattern), behavior="isolated"))
    last = ByteLevel(add_prefix_space=False, use_regex=not how.pattern)
    backend.pre_tokenizer = Sequence([*parts, last])
    if how.compose:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, how.bos


def sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Any, bool]:
    """A `tokenizers.Tokenizer` of a vocabulary with scores, and whether it starts with BOS.

    SentencePiece joins the two neighbours whose union has the best score. That is BPE, whose
    merges are all the ways to put a token together, the best token first.

    Raises:
      ValueError: scores or types are missing, or another number than tokens.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    scores, types = (_each(metadata, key, len(tokens)) for key in ("scores", "token_type"))
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind != NORMAL:
            continue
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        held = [pair for pair in halves if pair[0] in vocab and pair[1] in vocab]
        held.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, pair) for pair in held]
    merges.sort(key=lambda merge: -merge[0])
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=[pair for _, pair in merges], unk_token=unknown, fuse_unk=True,
            byte_fallback=True,
        )
    )  # fmt: skip
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _each(metadata: Mapping[str, Any], key: str, count: int) -> list:
    values = metadata.get(f"tokenizer.ggml.{key}") or []
    if len(values) != count:
        raise ValueError(
            f"`tokenizer.ggml.{key}` should hold {count} entries, but got {len(values)}."
        )
    return values


# By `tokenizer.ggml.model`.
KINDS = {"gpt2": byte_level, "llama": sentencepiece}
