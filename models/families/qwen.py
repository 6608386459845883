"""Qwen2 and 2.5 with a bias of queries, keys and values; Qwen3 with norms of queries and keys."""

from __future__ import annotations

from directkv_jax.models.config import Experts, ModelConfig
from directkv_jax.models.families.common import Family, Values, checked


def qwen2(values) -> ModelConfig:
    """A bias on queries, keys and values alone."""
    held = checked(values)
    return held.model(_layers(held), attention_bias=True)


def qwen3(values) -> ModelConfig:
    """Norms of queries and keys instead of biases."""
    held = checked(values)
    bias = held.get("attention_bias", False)
    return held.model(_layers(held), qk_norm=True, attention_bias=bias, output_bias=bias)


def qwen3_moe(values) -> ModelConfig:
    """Qwen3 with a mixture of experts in most layers."""
    held = checked(values, "num_experts_per_tok", "moe_intermediate_size")
    count = held.get("num_experts") or held["num_local_experts"]  # the later name
    experts = Experts(
        count, held["num_experts_per_tok"], held["moe_intermediate_size"],
        held.get("norm_topk_prob", False),
    )  # fmt: skip
    step, plain = held.get("decoder_sparse_step", 1), held.get("mlp_only_layers", [])
    sparse = [
        index not in plain and (index + 1) % step == 0 for index in range(held["num_hidden_layers"])
    ]
    window = held.get("sliding_window") if held.get("use_sliding_window", False) else None
    layers = [held.layer(held.rope(), window, experts if each else None) for each in sparse]
    bias = held.get("attention_bias", False)
    return held.model(layers, qk_norm=True, attention_bias=bias, output_bias=bias)


def _layers(held: Values):
    window = held.get("sliding_window") if held.get("use_sliding_window", False) else None
    first = held.get("max_window_layers", 28)
    sliding = held.layer_types(lambda index: window is not None and index >= first)
    return [held.layer(held.rope(), window if each else None) for each in sliding]


FAMILIES = {"qwen2": Family(qwen2), "qwen3": Family(qwen3), "qwen3_moe": Family(qwen3_moe)}
