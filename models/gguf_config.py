"""What a GGUF file says of its model, in the words of a `config.json` that `families` can read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from directkv_jax.models import families
from directkv_jax.models.config import LayerConfig, ModelConfig
from directkv_jax.models.families.common import KINDS
from directkv_jax.models.gguf_architectures import ARCHITECTURES, Architecture
from directkv_jax.models.kinds import AMOUNT, COUNT, INDEX, Kind, check_all

# Key of a `config.json` -> key of the metadata, after the name of the architecture.
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}
_REQUIRED = (
    "embedding_length", "feed_forward_length", "block_count", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_SCALING = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_OLD_FACTOR = "rope.scale_linear"
_SCALINGS = ("none", "linear", "yarn", "longrope")
_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
_CHECKED: dict[str, Kind] = {
    **{key: KINDS[name] for name, key in _KEYS.items()},
    **dict.fromkeys((*_SCALING.values(), _OLD_FACTOR), AMOUNT),
    "rope.dimension_count": COUNT, "attention.sliding_window": INDEX, "attention.scale": AMOUNT,
}  # fmt: skip
_IDS = {name: f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eos_token_id")}
_DIVISORS = "rope_freqs.weight"
ROPE_TENSORS = (_DIVISORS, *_FACTORS.values())


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a file holds, before any weight is read.

    Attributes:
      metadata: its keys.
      shapes: of its tensors, [out, in].
      read: name of a tensor -> its values.
    """

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def read_config(file: Contents) -> tuple[Architecture, ModelConfig]:
    """The architecture of a file, and the shapes and constants of its model.

    Raises:
      ValueError: the architecture is unknown, or a key is missing or makes no sense.
      NotImplementedError: the file has what its family does not support.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"`general.architecture` should be one of {known}, but got {name!r}.")
    if INDEX.check("split.count", file.metadata.get("split.count", 1)) > 1:
        raise ValueError("the file is one part of a split GGUF. Merge the parts first.")
    architecture, prefix = ARCHITECTURES[name], f"{name}."
    held = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    if missing := [f"`{prefix}{key}`" for key in _REQUIRED if key not in held]:
        raise ValueError(f"the metadata lacks {', '.join(missing)}.")
    check_all(_CHECKED, held, prefix)
    check_all(dict.fromkeys(_IDS.values(), INDEX), file.metadata)
    per_head = held["embedding_length"] // held["attention.head_count"]
    head_dim = COUNT.check(
        f"{prefix}attention.key_length", held.get("attention.key_length", per_head)
    )
    rotary = held.get("rope.dimension_count", head_dim)
    if architecture.permuted and rotary != head_dim:
        raise ValueError(f"`{prefix}rope.dimension_count` should be {head_dim}, but got {rotary}.")
    values = {
        **architecture.values,
        **{key: held[other] for key, other in _KEYS.items() if other in held},
        **_from_tensors(file, held["block_count"]),
        **_windows(held, architecture, prefix),
        "model_type": next(
            (kind for key, kind in architecture.variants.items() if held.get(key)),
            architecture.model_type,
        ),
        "query_pre_attn_scalar": per_head if held["block_count"] == architecture.wide else head_dim,
        # The next larger number, so that times H it is not below `rotary`.
        "partial_rotary_factor": min(1.0, math.nextafter(rotary / head_dim, 2)),
        "rope_scaling": _scaling(file, held, prefix),
        **{name: file.metadata.get(key) for name, key in _IDS.items()},
    }
    config = families.find(values).config(values)
    return architecture, _completed(config, file, held)


def _from_tensors(file: Contents, layers: int) -> dict[str, Any]:
    if "token_embd.weight" not in file.shapes:
        raise ValueError("the file lacks the tensor `token_embd.weight`.")
    routers = [f"blk.{index}.ffn_gate_inp.weight" in file.shapes for index in range(layers)]
    return {
        "vocab_size": file.shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "mlp_only_layers": [index for index, router in enumerate(routers) if not router],
    }


def _windows(held: Mapping[str, Any], architecture: Architecture, prefix: str) -> dict[str, Any]:
    usual = architecture.values.get("sliding_window")
    window = held.get("attention.sliding_window", usual) or None  # 0: there is none
    pattern = held.get("attention.sliding_window_pattern")
    if pattern is None:
        return {"sliding_window": window}
    if isinstance(pattern, list):
        kinds = ("full_attention", "sliding_attention")
        return {"sliding_window": window, "layer_types": [kinds[bool(each)] for each in pattern]}
    period = COUNT.check(f"{prefix}attention.sliding_window_pattern", pattern)
    return {"sliding_window": window, "sliding_window_pattern": period}


def _scaling(file: Contents, held: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = {key: held[other] for key, other in _SCALING.items() if held.get(other)}  # 0: unset
    if "factor" not in found and held.get(_OLD_FACTOR):
        found["factor"] = held[_OLD_FACTOR]
    kind = held.get("rope.scaling.type", "linear" if "factor" in found else "none")
    if kind == "linear" and "factor" not in found:
        kind = "none"
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise ValueError(f"`{prefix}rope.scaling.type` should be one of {known}, but got {kind!r}.")
    factors = {
        key: tuple(map(float, file.read(name)))
        for key, name in _FACTORS.items()
        if name in file.shapes
    }
    if factors:  # the files of Phi-3 do not name the type
        kind = "longrope"
    if kind == "yarn" and "attention_factor" in found and found.get("factor", 0) > 1:
        # There it multiplies what follows from the factor; on Hugging Face it stands for it.
        found["attention_factor"] *= 1 + 0.1 * math.log(found["factor"])
    return {} if kind == "none" else {"rope_type": kind, **found, **factors}


def _completed(config: ModelConfig, file: Contents, held: Mapping[str, Any]) -> ModelConfig:
    """With what the tensors tell, and the family does not have by default."""
    divisors = tuple(map(float, file.read(_DIVISORS))) if _DIVISORS in file.shapes else ()

    def biased(name: str) -> bool:
        return f"blk.0.{name}.bias" in file.shapes

    def divided(layer: LayerConfig) -> LayerConfig:
        if layer.rope is None or not divisors:
            return layer
        return dataclasses.replace(
            layer, rope=dataclasses.replace(layer.rope, freq_divisors=divisors)
        )

    return dataclasses.replace(
        config,
        layers=tuple(map(divided, config.layers)),
        attention_bias=config.attention_bias or biased("attn_q") or biased("attn_qkv"),
        output_bias=config.output_bias or biased("attn_output"),
        mlp_bias=config.mlp_bias or biased("ffn_up"),
        attention_scale=held.get("attention.scale") or config.attention_scale,  # 0: unset
    )
