"""Llama 2 and 3, SmolLM 1 and 2, and what else says "llama"; Mistral, with a sliding window."""

from __future__ import annotations

from directkv_jax.models.config import ModelConfig
from directkv_jax.models.families.common import Family, checked


def llama(values) -> ModelConfig:
    """Pre-norm, RoPE, grouped queries, SwiGLU."""
    held = checked(values)
    bias = held.get("attention_bias", False)
    layers = [held.layer(held.rope())] * held["num_hidden_layers"]
    return held.model(
        layers, attention_bias=bias, output_bias=bias, mlp_bias=held.get("mlp_bias", False)
    )


def mistral(values) -> ModelConfig:
    """Llama whose queries see a window of tokens, where the file says so."""
    held = checked(values)
    layer = held.layer(held.rope(), held.get("sliding_window"))
    return held.model([layer] * held["num_hidden_layers"])


FAMILIES = {"llama": Family(llama), "mistral": Family(mistral)}
