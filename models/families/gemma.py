"""Gemma 2 and 3: local and global layers, norms around attention and MLP.

Gemma 2 has soft caps; Gemma 3 norms of queries and keys, and a RoPE for each type of layer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from directkv_jax.models.config import ModelConfig
from directkv_jax.models.families.common import Family, Values, checked
from directkv_jax.models.names import LLAMA


def gemma2(values) -> ModelConfig:
    """Every other layer is local, the first too."""
    held = checked(values, "sliding_window")
    sliding = held.layer_types(lambda index: index % 2 == 0)
    layers = [held.layer(held.rope(), held["sliding_window"] if each else None) for each in sliding]
    return held.model(layers, **_options(held))


def gemma3(values) -> ModelConfig:
    """Five local layers, then a global one."""
    held = checked(values, "sliding_window")
    pattern = held.get("sliding_window_pattern", 6)
    sliding = held.layer_types(lambda index: (index + 1) % pattern != 0)
    if "rope_parameters" in held:
        ropes = [held.rope("full_attention"), held.rope("sliding_attention")]
    else:
        local = held.get("rope_local_base_freq", 10000.0)
        theta = held.get("rope_theta", 1_000_000.0)
        ropes = [held.rope(theta=theta), held.rope(theta=local, scaling=())]
    layers = [held.layer(ropes[each], held["sliding_window"] if each else None) for each in sliding]
    return held.model(layers, qk_norm=True, **_options(held))


def gemma3_multimodal(values) -> ModelConfig:
    """The text model of Gemma 3 that also sees images."""
    text = Values(values)["text_config"]
    ends = {name: values[name] for name in ("bos_token_id", "eos_token_id") if name in values}
    return gemma3({**_TEXT_DEFAULTS, **ends, **text, "model_type": values["model_type"]})


def _options(held: Values) -> dict[str, Any]:
    if held.get("use_bidirectional_attention", False):
        raise NotImplementedError(
            "A model whose tokens see later ones (`use_bidirectional_attention`) writes no text."
        )
    bias = held.get("attention_bias", False)
    return {
        "activation": held.activation("hidden_activation", "hidden_act", default="gelu_tanh"),
        "sandwich": True,
        "norm_offset": 1.0,
        "attention_bias": bias,
        "output_bias": bias,
        "attention_scale": held.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_soft_cap": held.get("attn_logit_softcapping", 0.0),
        "logit_soft_cap": held.get("final_logit_softcapping", 0.0),
        "embedding_scale": math.sqrt(held["hidden_size"]),
        "tie_word_embeddings": held.get("tie_word_embeddings", True),
    }


# What the published files of the multimodal models leave out.
_TEXT_DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "sliding_window": 4096, "max_position_embeddings": 131072, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_NAMES = LLAMA.renamed(
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    output_norm="post_feedforward_layernorm",
)
_IMAGES = ("vision_tower.", "multi_modal_projector.")
FAMILIES = {
    "gemma2": Family(gemma2, _NAMES),
    "gemma3_text": Family(gemma3, _NAMES),
    "gemma3": Family(
        gemma3_multimodal,
        dataclasses.replace(_NAMES, prefix="model.language_model."),
        # Of older files.
        spellings=(
            dataclasses.replace(
                _NAMES, prefix="language_model.model.", head="language_model.lm_head"
            ),
        ),
        ignored=(*_IMAGES, *(f"model.{name}" for name in _IMAGES)),
    ),
}
