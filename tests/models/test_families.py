"""What the families make of a `config.json`, in the spellings of several years."""

from __future__ import annotations

import pytest

from directkv_jax.models import ModelConfig
from directkv_jax.models.config import Experts

BASE = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def config(kind, **changes):
    return ModelConfig.from_dict({**BASE, "model_type": kind, **changes})


def windows(model):
    return [layer.window for layer in model.layers]


def test_gemma3_in_both_spellings():
    old = {
        "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    first = config("gemma3_text", sliding_window=8, sliding_window_pattern=3, **old)
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    second = config("gemma3_text", sliding_window=8, layer_types=types, rope_parameters=new)
    assert first == second
    assert windows(first) == [8, 8, None] * 2
    assert [layer.rope.theta for layer in first.layers[1:3]] == [1e4, 1e6]


def test_windows_where_the_file_does_not_list_them():
    assert windows(config("gemma2", sliding_window=8)) == [8, None] * 3
    assert windows(config("mistral", sliding_window=8)) == [8] * 6
    assert windows(config("mistral", sliding_window=None)) == [None] * 6
    options = {"sliding_window": 8, "max_window_layers": 4}
    assert windows(config("qwen2", **options)) == [None] * 6
    assert windows(config("qwen2", use_sliding_window=True, **options)) == [None] * 4 + [8] * 2


def test_layers_without_positions():
    turns = [layer.rope is not None for layer in config("smollm3").layers]
    assert turns == [True, True, True, False, True, True]
    listed = config("smollm3", no_rope_layers=[1, 0, 1, 0, 1, 1])
    assert [layer.rope is not None for layer in listed.layers] == [1, 0, 1, 0, 1, 1]


def test_experts_in_some_layers():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1], **experts)
    assert [layer.experts is not None for layer in model.layers] == [0, 0, 0, 1, 0, 1]
    assert model.layers[3].experts == Experts(4, 2, 24, normalize=False)


def test_phi3_takes_the_original_context_from_either_place():
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = config("phi3", rope_scaling=scaling, original_max_position_embeddings=16)
    inside = config("phi3", rope_scaling={**scaling, "original_max_position_embeddings": 16})
    assert model.layers == inside.layers
    rope = model.layers[0].rope
    short, long = rope.resolve(8, 16), rope.resolve(8, 64)
    assert long.frequencies[1] == pytest.approx(short.frequencies[1] / 4)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mixtral", {}, "lacks `num_local_experts`, `num_experts_per_tok`"),
        (
            "mixtral",
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            "at most 2 experts, but got 3",
        ),
        ("gemma2", {}, "lacks `sliding_window`"),
        ("qwen2", {"layer_types": ["full_attention"]}, "`layer_types` should be 6 of"),
        ("gemma3_text", {"sliding_window": 0}, "`sliding_window` should be a positive int"),
        ("smollm3", {"no_rope_layers": [1]}, "`no_rope_layers` should have 6 entries, but got 1"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16}, "projected embedding"),
        ("opt", {}, "lacks `ffn_dim`"),
        (
            "llama",
            {"hidden_size": 36, "head_dim": 8},
            "`hidden_size` should be a multiple of 8, but got 36",
        ),
        (None, {}, "`model_type` should be one of gemma2, .*, but got None"),
    ],
)
def test_errors(kind, changes, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        config(kind, **changes)
