"""Mixtral: Llama with a mixture of experts in every layer."""

from __future__ import annotations

from directkv_jax.models.config import Experts, ModelConfig
from directkv_jax.models.families.common import Family, checked
from directkv_jax.models.names import LLAMA


def mixtral(values) -> ModelConfig:
    """The weights of a token's experts sum to 1."""
    held = checked(values, "num_local_experts", "num_experts_per_tok")
    experts = Experts(
        held["num_local_experts"], held["num_experts_per_tok"], held["intermediate_size"]
    )
    layer = held.layer(held.rope(), held.get("sliding_window"), experts)
    return held.model([layer] * held["num_hidden_layers"], norm_eps=held.get("rms_norm_eps", 1e-5))


_NAMES = LLAMA.renamed(
    experts__router="block_sparse_moe.gate",
    experts__gate_proj="block_sparse_moe.experts.{}.w1",
    experts__up_proj="block_sparse_moe.experts.{}.w3",
    experts__down_proj="block_sparse_moe.experts.{}.w2",
)
FAMILIES = {"mixtral": Family(mixtral, _NAMES)}
