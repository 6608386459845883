"""GGUF files that do not load say why."""

from __future__ import annotations

from pathlib import Path

import gguf_writer
import numpy as np
import pytest

from directkv_jax.models import load

PARITY = Path(__file__).parents[1] / "data" / "parity"


def quietly(path):
    return load(path, "float32", progress=False)


@pytest.mark.parametrize("name", ["llama-3.1", "gemma-2"])
@pytest.mark.parametrize("keep", [0.01, 0.2, 0.5, 0.999])
def test_a_truncated_file(keep, name, tmp_path):
    path = gguf_writer.write(PARITY / name, tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match="should be a complete GGUF file"):
        quietly(path)


def test_a_type_that_cannot_be_expanded(tmp_path):
    extra = [("blk.0.extra.weight", np.zeros((2, 32), np.int8), None)]
    path = gguf_writer.write(PARITY / "llama-2", tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ValueError, match=r"`blk.0.extra.weight` has the GGUF type I8") as error:
        load(path, progress=False)
    assert "BF16, F16, F32, IQ1_M" in str(error.value)


def test_a_type_without_a_name(tmp_path):
    path = gguf_writer.write(PARITY / "llama-2", tmp_path / "m.gguf")
    content = path.read_bytes()
    at = content.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8
    path.write_bytes(content[:at] + (199).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ValueError, match=r"a tensor has an unknown type .*199") as error:
        load(path, progress=False)
    assert "BF16, F16, F32, IQ1_M" in str(error.value)


def test_more_tokens_than_rows(tmp_path):
    path = gguf_writer.write(PARITY / "qwen3", tmp_path / "m.gguf", vocabulary=68)
    with pytest.raises(ValueError, match="knows 68 tokens, but the embedding has 67 rows"):
        load(path, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "bert"}, "`general.architecture` should be one of llama, .*, but got 'bert'"),
        ({"metadata": {"llama.block_count": None}}, "lacks `llama.block_count`"),
        ({"metadata": {"llama.expert_count": 8}}, "lacks `num_experts_per_tok`"),
        ({"metadata": {"split.count": 2}}, "one part of a split GGUF"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "should be 16, but got 8"),
        ({"metadata": {"llama.rope.scaling.type": "su"}}, "`llama.rope.scaling.type` should be"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "should be one of gpt2, llama, but got"),
        ({"metadata": {"tokenizer.ggml.pre": "deepseek"}}, "`tokenizer.ggml.pre`"),
        ({"metadata": {"tokenizer.ggml.merges": None}}, "lacks `tokenizer.ggml.merges`"),
        ({"metadata": {"tokenizer.ggml.merges": ["ab"]}}, "two tokens and a space, .* 'ab'"),
        ({"metadata": {"tokenizer.ggml.merges": "ab"}}, "should be a list of texts, but got 'ab'"),
        (
            {"metadata": {"tokenizer.ggml.bos_token_id": "x"}},
            "ggml.bos_token_id` should be an int",
        ),
        ({"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "should be positive, but got"),
        ({"extra": {"rope_freqs.weight": np.full(8, np.nan, np.float32)}}, "should be positive"),
        (
            {"metadata": {"llama.expert_count": 10**7}},
            "count` should be an int in .0, 1024",
        ),
        ({"metadata": {"llama.attention.scale": "x"}}, "scale` should be a number, 0 or more"),
        ({"metadata": {"llama.rope.dimension_count": "x"}}, "dimension_count` should be"),
        ({"metadata": {"llama.block_count": 3}}, "missing: `blk.2.attn_q.weight`"),
        ({"metadata": {"llama.feed_forward_length": 95}}, r"expected \(95, 64\), got \(96, 64\)"),
        ({"extra": {"blk.0.odd.weight": np.ones(3, np.float32)}}, "unexpected: `blk.0.odd.weight`"),
    ],
)
def test_a_file_of_something_else(changes, message, tiny, tmp_path):
    with pytest.raises(ValueError, match=message):
        quietly(tiny.write_gguf(tmp_path / "m.gguf", tiny.config, tiny.weights, **changes))


def test_a_list_that_is_longer_than_the_file(tmp_path):
    """It is not walked through to where it would end."""
    key, uint8, array = b"a.list", 0, 9
    parts = (
        (b"GGUF", (3).to_bytes(4, "little")),
        [n.to_bytes(8, "little") for n in (0, 1, len(key))],
        (key, array.to_bytes(4, "little"), uint8.to_bytes(4, "little")),
        [(1 << 40).to_bytes(8, "little")],
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(b"".join(each for part in parts for each in part))
    with pytest.raises(ValueError, match=r"truncated or damaged .it ends before byte"):
        quietly(path)
