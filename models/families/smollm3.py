"""SmolLM3: Llama in which every fourth layer has no positions at all."""

from __future__ import annotations

from directkv_jax.models.config import ModelConfig
from directkv_jax.models.families.common import Family, checked


def smollm3(values) -> ModelConfig:
    """`no_rope_layers` has a 1 for each layer with RoPE."""
    held = checked(values)
    count, interval = held["num_hidden_layers"], held.get("no_rope_layer_interval", 4)
    turns = held.get("no_rope_layers") or [
        int((index + 1) % interval != 0) for index in range(count)
    ]
    if len(turns) != count:
        raise ValueError(f"`no_rope_layers` should have {count} entries, but got {len(turns)}.")
    window = held.get("sliding_window") if held.get("use_sliding_window", False) else None
    sliding = held.layer_types(lambda index: window is not None and not turns[index])
    rope, bias = held.rope(), held.get("attention_bias", False)
    layers = [
        held.layer(rope if turn else None, window if each else None)
        for turn, each in zip(turns, sliding, strict=True)
    ]
    return held.model(
        layers, attention_bias=bias, output_bias=bias, mlp_bias=held.get("mlp_bias", False),
        tie_word_embeddings=held.get("tie_word_embeddings", True),
    )  # fmt: skip


FAMILIES = {"smollm3": Family(smollm3)}
