"""OPT: learned positions, biases, LayerNorm, one KV head for each query head."""

from __future__ import annotations

import dataclasses

from directkv_jax.models.config import LayerConfig, ModelConfig
from directkv_jax.models.families.common import Family, Values
from directkv_jax.models.kinds import token_ids
from directkv_jax.models.names import LLAMA

_OFFSET = 2  # rows of the table of positions before the first


def opt(values) -> ModelConfig:
    """All but the 350M model, whose norms come last and whose embedding is narrower."""
    held = Values(values)
    held.require("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads")
    width, heads = held["hidden_size"], held["num_attention_heads"]
    if held.get("word_embed_proj_dim", width) != width or not held.get(
        "do_layer_norm_before", True
    ):
        raise NotImplementedError(
            "OPT with a projected embedding or norms that come last (the 350M model) is not "
            "supported."
        )
    bias, positions = held.get("enable_bias", True), held.get("max_position_embeddings", 2048)
    layer = LayerConfig(heads, heads, width // heads, held["ffn_dim"])
    return ModelConfig(
        family="opt",
        vocab_size=held["vocab_size"],
        hidden_size=width,
        layers=(layer,) * held["num_hidden_layers"],
        norm="layer",
        norm_eps=1e-5,
        attention_bias=bias,
        output_bias=bias,
        activation=held.activation("activation_function", default="relu"),
        gated=False,
        mlp_bias=bias,
        learned_positions=positions + _OFFSET,
        position_offset=_OFFSET,
        tie_word_embeddings=held.get("tie_word_embeddings", True),
        max_position_embeddings=positions,
        bos_token_id=held.get("bos_token_id"),
        eos_token_id=token_ids(held.get("eos_token_id")),
    )


_NAMES = dataclasses.replace(
    LLAMA.renamed(
        input_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        attention__o_proj="self_attn.out_proj",
        mlp__up_proj="fc1",
        mlp__down_proj="fc2",
    ),
    prefix="model.decoder.",
    top={
        "embed.tokens": "embed_tokens",
        "embed.positions": "embed_positions",
        "norm": "final_layer_norm",
    },
)
FAMILIES = {"opt": Family(opt, _NAMES)}
