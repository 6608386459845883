"""Tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directkv_jax.models.gguf_tokenizer import tokenizer_from_metadata
from directkv_jax.models.gguf_vocabulary import SPLITTINGS

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
PIECES = [SPACE, *"abc", "ab", "bc", "abc", f"{SPACE}a", f"{SPACE}ab", "ca", f"{SPACE}{SPACE}"]


def scored(pieces=PIECES, ranks=None, extra=(), **changes):
    """Metadata of a SentencePiece vocabulary; `extra` are (token, type)."""
    tokens = [*SPECIAL, *BYTES, *pieces, *(token for token, _ in extra)]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), *(kind for _, kind in extra)]
    ranks = ranks or [-float(rank) for rank in range(len(pieces))]
    values = {
        "model": "llama", "tokens": tokens, "token_type": types,
        "scores": [0.0] * 259 + list(ranks) + [0.0] * len(extra),
        "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def joined(text, scores):
    """SentencePiece as its paper describes it: join the best pair until there is none."""
    parts = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts))
                 if a + b in scores]  # fmt: skip
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=60, deadline=None)
@given(
    st.text("abc ", max_size=12),
    st.permutations(range(len(PIECES))),
)
def test_scores_join_what_sentencepiece_joins(text, ranks):
    scores = dict(zip(PIECES, map(float, ranks), strict=True))
    tokenizer = tokenizer_from_metadata(scored(ranks=[float(rank) for rank in ranks]))
    got = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)]
    assert got == ["<s>", *joined(text, scores)]


@pytest.fixture(scope="module", params=[True, False])
def either(request):
    """With and without a space before the text."""
    return tokenizer_from_metadata(scored(add_space_prefix=request.param))


@settings(max_examples=30, deadline=None)
@given(text=st.text("abc é漢🙂\n\0", max_size=20))
def test_unknown_characters_become_bytes_and_come_back(text, either):
    tokenizer = either
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert 0 not in ids
    assert tokenizer.decode(ids) == text
    decoder = tokenizer.stream_decoder()
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text


def test_tokens_of_the_user_and_of_control_are_found_in_the_text():
    extra = [(f"{SPACE}{SPACE}{SPACE}", 4), ("<end_of_turn>", 3)]
    tokenizer = tokenizer_from_metadata(scored(extra=extra, add_space_prefix=False))
    ids = tokenizer.encode("a   b<end_of_turn>")
    tokens = [tokenizer.backend.id_to_token(index) for index in ids]
    assert tokens == ["<s>", "a", "   ", "b", "<end_of_turn>"]
    assert tokenizer.decode(ids) == "a   b"
    assert tokenizer.eos_ids == (2, ids[-1])
    assert tokenizer.vocab_size == len(SPECIAL) + 256 + len(PIECES) + 2


def test_the_first_token_may_be_left_out():
    assert tokenizer_from_metadata(scored(add_bos_token=False)).encode("a")[0] != 1


ALPHABET = [chr(byte) for byte in range(33, 127)] + ["Ġ", "Ċ"]


def merged(pre, tokens=(), merges=("a b",), **changes):
    """Metadata of a byte-level vocabulary."""
    values = {"model": "gpt2", "pre": pre, "tokens": [*ALPHABET, "ab", *tokens],
              "merges": list(merges), **changes}  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġ", "ĠfooBar", "!", "Ċ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "ĠfooBar", "!", "Ċ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġ", "ĠfooBar", "!Ċ"]),
        ("smaug-bpe", ["It", "'s", "Ġ", "123", "4", "Ġ", "ĠfooBar", "!Ċ"]),
        ("dbrx", ["It", "'s", "Ġ", "123", "4", "Ġ", "ĠfooBar", "!Ċ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "ĠfooBar", "!Ċ"]),
        ("gpt-4o", ["It's", "Ġ", "123", "4", "Ġ", "Ġfoo", "Bar", "!Ċ"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġfoo", "Bar", "!Ċ"]),
    ],
)
def test_how_texts_are_cut(pre, pieces):
    backend = tokenizer_from_metadata(merged(pre)).backend
    cut = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("It's 1234  fooBar!\n")]
    assert cut == pieces


def test_every_way_to_cut_is_tested():
    cases = test_how_texts_are_cut.pytestmark[0].args[1]
    assert {pre for pre, _ in cases} == set(SPLITTINGS)


def test_whole_pieces_and_composed_characters():
    whole = merged("tekken", tokens=["xyz"])
    assert tokenizer_from_metadata(whole).encode("xyz") == [len(ALPHABET) + 1]
    assert len(tokenizer_from_metadata({**whole, "tokenizer.ggml.pre": "dbrx"}).encode("xyz")) == 3
    composed = tokenizer_from_metadata(merged("qwen2")).backend.normalizer
    assert composed.normalize_str("e\u0301") == "\u00e9"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "`tokenizer.ggml.model` should be one of gpt2, llama, but got None"),
        (scored(model="t5"), "but got 't5'.*Hugging Face folder"),
        (scored(tokens=None), "lacks `tokenizer.ggml.tokens`"),
        (scored(scores=None), "`tokenizer.ggml.scores` should hold 270 entries, but got 0"),
        (scored(scores=[0.0]), "`tokenizer.ggml.scores` should hold 270 entries, but got 1"),
        (scored(token_type=[1]), "`tokenizer.ggml.token_type` should hold 270 entries, but got 1"),
        (scored(bos_token_id=270), "bos_token_id` should be one of 270 tokens, but got 270"),
        (
            merged("falcon"),
            "`tokenizer.ggml.pre` should be one of gpt-2, .*tekken, but got 'falcon'",
        ),
        (merged("qwen2", merges=[]), "lacks `tokenizer.ggml.merges`"),
        (merged("qwen2", merges=["x y"]), "the tokenizer of the file is inconsistent"),
    ],
)
def test_errors(metadata, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_metadata(metadata)
