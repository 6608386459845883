"""Rotary position embedding, in the convention of Hugging Face: halves are rotated, not pairs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax.models.config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """float32[H/2], radians per position, with the scaling of the config applied."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency = config.rope_theta**-exponent
    if config.rope_freq_divisors:
        frequency = frequency / np.asarray(config.rope_freq_divisors, np.float64)
    scaling = dict(config.rope_scaling)
    if scaling.get("rope_type") == "linear":
        frequency = frequency / scaling["factor"]
    elif scaling.get("rope_type") == "llama3":
        frequency = _llama3(frequency, scaling)
    return frequency.astype(np.float32)


def _llama3(frequency: np.ndarray, scaling: dict) -> np.ndarray:
    # Long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = context * frequency / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling["factor"]


def rotations(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each float32[B, T, 1, H/2], of int32 positions [B, T]."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates queries or keys [B, T, heads, H]; computed in float32, returned in x's dtype."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
