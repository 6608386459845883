"""What the families make of a `config.json`, in the spellings of several years."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from directkv_jax.models import ModelConfig
from directkv_jax.models.config import Experts

PARITY = Path(__file__).parents[1] / "data" / "parity"
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


WRONG = (
    "x", "1", "", -1, -0.5, 1 << 70, True, [], [1], ["x"], [None], {}, {"a": 1}, float("nan"),
    float("inf"), {"rope_type": []}, {"rope_theta": "x"}, {"partial_rotary_factor": "x"},
    {"rope_type": "linear"}, {"rope_type": "linear", "factor": True},
    {"rope_type": "yarn", "factor": "x"}, {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"},
    {"rope_type": "yarn", "factor": 2.0, "mscale": "x", "mscale_all_dim": 1},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"},
    {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1},
    {"rope_type": "longrope", "short_factor": "x", "long_factor": [1]},
    {"rope_type": "llama3", "factor": 1 << 2000, "low_freq_factor": 1, "high_freq_factor": 4},
)  # fmt: skip


@pytest.mark.parametrize("folder", sorted(PARITY.iterdir()), ids=lambda folder: folder.name)
def test_a_wrong_value_is_an_error_or_harmless(folder):
    """Never another exception; and what every family computes with is named."""
    values = json.loads((folder / "config.json").read_text())
    extra = ("rope_scaling", "rope_theta", "head_dim", "sliding_window", "layer_types")
    for name in (*values, *extra):
        for wrong in WRONG:
            with contextlib.suppress(ValueError, NotImplementedError):
                ModelConfig.from_dict({**values, name: wrong})
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings"):
        for wrong in ("x", -1, 1.5, [], {}, 1 << 70):
            with pytest.raises(ValueError, match=f"`{name}` should be"):
                ModelConfig.from_dict({**values, name: wrong})


@pytest.mark.parametrize(
    "values",
    [
        {"rms_norm_eps": "x"}, {"rms_norm_eps": -1}, {"rms_norm_eps": float("nan")},
        {"rope_scaling": "linear"}, {"rope_theta": "x"},
    ],
    ids=repr,
)  # fmt: skip
def test_the_value_that_is_wrong_is_named(values):
    for kind in ("llama", "qwen3", "phi3"):
        with pytest.raises(ValueError, match=f"`{next(iter(values))}` should be"):
            config(kind, **values)
    with pytest.raises(ValueError, match="`model_type` should be one of"):
        config([])


def test_large_bases_and_what_no_scaling_uses():
    base = config("llama", rope_theta=3580165449)
    assert base.layers[0].rope.theta == 3580165449.0
    hash(config("llama", rope_scaling={"rope_type": "linear", "factor": 2.0, "notes": {"a": [1]}}))
    for wrong in ({"rope_theta": 10**400}, {"rope_theta": "abc"}):
        with pytest.raises(ValueError, match="`rope_theta` should be"):
            config("llama", rope_parameters=wrong)
    for wrong in (float("inf"), 10**400):
        with pytest.raises(ValueError, match="`factor` should be a positive number"):
            config("llama", rope_scaling={"rope_type": "linear", "factor": wrong})


def test_what_a_family_does_not_read_is_not_looked_at():
    odd = {
        "sliding_window": False, "decoder_sparse_step": 0, "query_pre_attn_scalar": 0,
        "word_embed_proj_dim": "x", "final_logit_softcapping": [],
    }  # fmt: skip
    assert config("llama", **odd) == config("llama")
    assert config("llama", tie_word_embeddings=1).tie_word_embeddings
    assert repr(config("llama", tie_word_embeddings=1)) == repr(
        config("llama", tie_word_embeddings=True)
    )
    new = {"rope_type": "default", "rope_theta": 5e5}
    assert config("llama", rope_theta=0, rope_parameters=new) == config("llama", rope_theta=5e5)
    types = ("full_attention", "sliding_attention") * 3
    assert windows(config("gemma2", sliding_window=8, layer_types=types)) == [None, 8] * 3


def test_a_rope_for_each_type_of_layer_is_not_ignored():
    with pytest.raises(NotImplementedError, match="a mapping for each type of layer"):
        config("llama", rope_parameters={"full_attention": {"rope_theta": 5.0}})
    with pytest.raises(TypeError, match="a configuration should be a mapping"):
        ModelConfig.from_dict([])


def test_models_that_write_no_text():
    with pytest.raises(NotImplementedError, match="use_bidirectional_attention"):
        config("gemma3_text", sliding_window=8, use_bidirectional_attention=True)


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
