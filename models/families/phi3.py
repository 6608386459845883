"""Phi-3: packed weights, a part of each head that turns, LongRoPE."""

from __future__ import annotations

import dataclasses

from directkv_jax.models.config import ModelConfig
from directkv_jax.models.families.common import Family, checked
from directkv_jax.models.names import LLAMA


def phi3(values) -> ModelConfig:
    """Llama with other files, and a sliding window where they say so."""
    held = checked(values)
    layer = held.layer(held.rope(), held.get("sliding_window"))
    return held.model([layer] * held["num_hidden_layers"], norm_eps=held.get("rms_norm_eps", 1e-5))


_NAMES = dataclasses.replace(LLAMA, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
FAMILIES = {"phi3": Family(phi3, _NAMES)}
