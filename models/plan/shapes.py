"""Models by name, each the part of its published `config.json` that sizes depend on."""

from __future__ import annotations

from typing import Any

from directkv_jax.models.config import ModelConfig

_LLAMA31 = {
    "model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_LLAMA32 = {
    **_LLAMA31,
    "tie_word_embeddings": True,
    "rope_scaling": {**_LLAMA31["rope_scaling"], "factor": 32.0},  # type: ignore[dict-item]
}
# As the instruct models have it: trained on 32k, and to be scaled by YaRN beyond.
_QWEN25 = {
    "model_type": "qwen2", "vocab_size": 152064, "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}  # fmt: skip
_MISTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
}  # fmt: skip
_GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": 262208, "sliding_window": 1024,
    "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 131072,
}  # fmt: skip


def _phi3(head_dim: int, **values: Any) -> dict[str, Any]:
    # The published factors are left at 1: no size depends on them.
    factors = [1.0] * (head_dim // 2)
    return {
        "model_type": "phi3", "vocab_size": 32064, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": factors, "long_factor": factors},
        **values,
    }  # fmt: skip


def _opt(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt", "vocab_size": 50272, "hidden_size": width, "ffn_dim": 4 * width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 2048,
    }  # fmt: skip


def _sizes(width: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {**_LLAMA31, **_sizes(4096, 14336, 32, 32, 8)},
    "llama-3.1-70b": {**_LLAMA31, **_sizes(8192, 28672, 80, 64, 8)},
    "llama-3.2-1b": {**_LLAMA32, **_sizes(2048, 8192, 16, 32, 8)},
    "llama-3.2-3b": {**_LLAMA32, **_sizes(3072, 8192, 28, 24, 8)},
    "qwen2.5-7b": {**_QWEN25, **_sizes(3584, 18944, 28, 28, 4)},
    "qwen2.5-32b": {**_QWEN25, **_sizes(5120, 27648, 64, 40, 8)},
    "qwen3-8b": {**_QWEN3, **_sizes(4096, 12288, 36, 32, 8)},
    "qwen3-32b": {**_QWEN3, **_sizes(5120, 25600, 64, 64, 8)},
    "qwen3-30b-a3b": {
        **_QWEN3, **_sizes(2048, 6144, 48, 32, 4), "model_type": "qwen3_moe",
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "mistral-7b": {**_MISTRAL, "model_type": "mistral", "vocab_size": 32768},  # v0.3
    "mixtral-8x7b": {
        **_MISTRAL, "model_type": "mixtral", "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gemma-2-9b": {
        **_sizes(3584, 14336, 42, 16, 8), "model_type": "gemma2", "vocab_size": 256000,
        "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
    },
    "gemma-3-12b": {
        **_GEMMA3, **_sizes(3840, 15360, 48, 16, 8), "head_dim": 256, "query_pre_attn_scalar": 256,
    },
    "gemma-3-27b": {
        **_GEMMA3, **_sizes(5376, 21504, 62, 32, 16), "head_dim": 128, "query_pre_attn_scalar": 168,
    },
    # The files name a window as long as the context, or longer.
    "phi-3-mini": _phi3(96, **_sizes(3072, 8192, 32, 32, 32), sliding_window=262144),  # 128k
    "phi-3-medium": _phi3(128, **_sizes(5120, 17920, 40, 40, 10), sliding_window=131072),  # 128k
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "smollm2-135m": {
        **_sizes(576, 1536, 30, 9, 3), "model_type": "llama", "vocab_size": 49152,
        "rope_theta": 100000.0, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "smollm3-3b": {
        **_sizes(2048, 11008, 36, 16, 4), "model_type": "smollm3", "vocab_size": 128256,
        "rope_theta": 5e6, "tie_word_embeddings": True, "max_position_embeddings": 65536,
    },
}  # fmt: skip


def shape(name: str) -> ModelConfig:
    """The configuration of a model of `SHAPES`.

    Raises:
      ValueError: there is none of that name; lists those there are.
    """
    if name not in SHAPES:
        raise ValueError(f"`--shape` should be one of {', '.join(SHAPES)}, but got {name!r}.")
    return ModelConfig.from_dict(SHAPES[name])
