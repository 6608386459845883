"""What the metadata of GGUF files says of a model, in the forms that published files have."""

from __future__ import annotations

import math

import numpy as np
import pytest

from directkv_jax.models.config import Experts
from directkv_jax.models.gguf_architectures import ARCHITECTURES
from directkv_jax.models.gguf_config import Contents, read_config

BASE = {
    "embedding_length": 64, "feed_forward_length": 96, "block_count": 6,
    "attention.head_count": 4, "attention.head_count_kv": 2, "context_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def config(arch, *, tensors=(), factors=None, **changes):
    """Of a file with these keys (`__` is a dot), tensors of no shape, and factors."""
    keys = BASE | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    held = {f"{name}.weight": np.array(value) for name, value in (factors or {}).items()}
    shapes = {
        "token_embd.weight": (67, 64),
        **dict.fromkeys(tensors, ()),
        **dict.fromkeys(held, ()),
    }
    contents = Contents({"general.architecture": arch, **metadata}, shapes, held.__getitem__)
    return read_config(contents)[1]


def windows(model):
    return [layer.window for layer in model.layers]


def resolved(model, layer=0, capacity=None):
    return model.layers[layer].rope.resolve(model.layers[0].head_dim, capacity)


def test_gemma3_as_published():
    model = config(
        "gemma3", attention__key_length=32, attention__sliding_window=512,
        rope__freq_base=1e6, rope__scaling__type="linear", rope__scaling__factor=8.0,
    )  # fmt: skip
    assert windows(model) == [512] * 5 + [None]
    assert resolved(model, 0).frequencies[1] == pytest.approx(1e4 ** (-2 / 32))
    assert resolved(model, 5).frequencies[1] == pytest.approx(1e6 ** (-2 / 32) / 8)
    assert (model.attention_scale, model.embedding_scale) == (32**-0.5, 8.0)
    assert (model.norm_offset, model.qk_norm, model.tie_word_embeddings) == (1.0, True, True)


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_by_its_width(arch, layers):
    keys = {"attention__key_length": 32, "attention__sliding_window": 8}
    assert config(arch, block_count=layers, **keys).attention_scale == 16**-0.5
    assert config(arch, block_count=layers - 1, **keys).attention_scale == 32**-0.5
    assert config(arch, attention__scale=0.3, **keys).attention_scale == 0.3


def test_scalings_of_older_files():
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    expected = config("llama", **linear)
    assert config("llama", rope__scale_linear=4.0) == expected
    assert config("llama", rope__scaling__factor=4.0) == expected
    unscaled = config("llama")
    assert expected != unscaled
    assert config("llama", rope__scaling__factor=0.0) == unscaled  # not set
    assert config("llama", rope__scaling__type="linear") == unscaled
    assert config("llama", attention__scale=0.0) == unscaled
    assert config("llama", **{**linear, "rope__scaling__type": "none"}) == unscaled


def test_gemma2_without_a_window_has_the_usual_one():
    model = config("gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert windows(model) == [4096, None] * 3
    assert (model.attention_soft_cap, model.logit_soft_cap) == (50.0, 30.0)


def test_llama_with_a_window_or_experts():
    assert windows(config("llama")) == [None] * 6
    assert windows(config("llama", attention__sliding_window=8)) == [8] * 6
    assert windows(config("llama", attention__sliding_window=0)) == [None] * 6
    experts = {"expert_count": 4, "expert_used_count": 2}
    assert config("llama", **experts).layers[0].experts == Experts(4, 2, 96)
    assert config("llama", expert_count=0).layers[0].experts is None


def test_layers_have_experts_where_they_have_a_router():
    routers = [f"blk.{index}.ffn_gate_inp.weight" for index in (1, 3)]
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
    model = config("qwen3moe", tensors=routers, **keys)
    experts = [layer.experts for layer in model.layers]
    assert experts == [None, Experts(4, 2, 24), None, Experts(4, 2, 24), None, None]
    kept = config("qwen3moe", tensors=routers, expert_weights_norm=False, **keys)
    assert not kept.layers[1].experts.normalize


def test_tensors_tell_of_biases_and_the_output():
    model = config("llama", tensors=["blk.0.attn_q.bias", "output.weight"])
    assert (model.attention_bias, model.output_bias, model.mlp_bias) == (True, False, False)
    assert not model.tie_word_embeddings
    assert config("qwen2").attention_bias  # whatever is there: then the file lacks it
    model = config("qwen3", tensors=["blk.0.attn_output.bias", "blk.0.ffn_up.bias"])
    assert (model.attention_bias, model.output_bias, model.mlp_bias) == (False, True, True)
    assert model.tie_word_embeddings


def test_yarn_multiplies_the_factor_of_the_file():
    keys = {
        "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 2048,
    }  # fmt: skip
    usual = 1 + 0.1 * math.log(4)
    assert resolved(config("qwen3", **keys)).factor == pytest.approx(usual)
    scaled = config("qwen3", rope__scaling__attn_factor=0.5, **keys)
    assert resolved(scaled).factor == pytest.approx(usual / 2)
    narrow = config("qwen3", rope__scaling__yarn_beta_fast=4.0, **keys)
    assert resolved(narrow).frequencies != resolved(scaled).frequencies


def test_phi3_with_factors_for_short_and_long_contexts():
    factors = {"rope_factors_short": [1.0] * 6, "rope_factors_long": [4.0] * 6}
    model = config(
        "phi3", factors=factors, rope__dimension_count=12, attention__sliding_window=24,
        rope__scaling__original_context_length=32, rope__scaling__attn_factor=1.25,
    )  # fmt: skip
    short, long = resolved(model, capacity=32), resolved(model, capacity=64)
    assert (short.rotary_dim, long.factor, windows(model)) == (12, 1.25, [24] * 6)
    assert long.frequencies[1] == pytest.approx(short.frequencies[1] / 4)


@pytest.mark.parametrize(("size", "rotary"), [(88, 60), (96, 58), (128, 96), (128, 128)])
def test_a_part_of_a_head_turns(size, rotary):
    model = config("phi3", attention__key_length=size, rope__dimension_count=rotary)
    assert resolved(model).rotary_dim == rotary


def test_divisors_of_frequencies_reach_every_layer_with_positions():
    model = config("smollm3", factors={"rope_freqs": [2.0] * 8})
    plain = config("smollm3")
    assert [layer.rope is None for layer in model.layers] == [0, 0, 0, 1, 0, 0]
    assert resolved(model, 4).frequencies[3] == resolved(plain, 4).frequencies[3] / 2


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("bert", {}, f"should be one of {', '.join(ARCHITECTURES)}, but got 'bert'"),
        (
            "qwen2",
            {"block_count": None, "embedding_length": None},
            "lacks `qwen2.embedding_length`, `qwen2.block_count`",
        ),
        (
            "qwen2",
            {"attention__head_count": 0},
            "`qwen2.attention.head_count` should be a positive",
        ),
        (
            "qwen2",
            {"attention__head_count": [4, 2]},
            r"should be a positive int .*got \[4, 2\]",
        ),
        ("smollm3", {"rope__dimension_count": 8}, "dimension_count` should be 16, but got 8"),
        (
            "llama",
            {"rope__scaling__type": "dynamic"},
            "`llama.rope.scaling.type` should be one of none, linear, yarn, longrope, but got",
        ),
        ("phi3", {"rope__scaling__type": "longrope"}, "lacks `short_factor`"),
        ("llama", {"factors": {"rope_freqs": [2.0] * 3}}, "should be 8 divisors"),
        ("qwen3moe", {"expert_count": 4}, "lacks `num_experts_per_tok`"),
        ("gemma3", {}, "lacks `sliding_window`"),
        (
            "gemma3",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": 0},
            "`gemma3.attention.sliding_window_pattern` should be a positive int .*got 0",
        ),
        (
            "gemma3",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True]},
            "`layer_types` should be 6 of",
        ),
    ],
)
def test_errors(arch, changes, message):
    with pytest.raises(ValueError, match=message):
        config(arch, **changes)
