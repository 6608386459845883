"""The architectures of GGUF files: which family of models each is, and how its files differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from directkv_jax.models.names import Names

GGUF = Names(
    prefix="",
    head="output",
    block="blk.",
    top={"embed.tokens": "token_embd", "norm": "output_norm"},
    layer={
        "input_norm": "attn_norm",
        "attention.query": "attn_q",
        "attention.key": "attn_k",
        "attention.value": "attn_v",
        "attention.query_norm": "attn_q_norm",
        "attention.key_norm": "attn_k_norm",
        "attention.o_proj": "attn_output",
        "attention_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "output_norm": "post_ffw_norm",
        "experts.router": "ffn_gate_inp",
        "experts.gate_proj": "ffn_gate_exps",
        "experts.up_proj": "ffn_up_exps",
        "experts.down_proj": "ffn_down_exps",
    },
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How the files of a `general.architecture` differ from those of Hugging Face.

    Attributes:
      model_type: of the family in `families`.
      variants: key of the metadata -> the family where that key is there and not 0; the first
        counts.
      names: of the tensors.
      permuted: whether the rows of queries and keys are reordered (`gguf.unpermute`).
      values: what the format has no key for, or files leave out.
      wide: layers of the one model whose attention scale is (D / N) ** -0.5, not H ** -0.5.
    """

    model_type: str
    variants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Names = GGUF
    permuted: bool = False
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wide: int = 0


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        variants={"expert_count": "mixtral", "attention.sliding_window": "mistral"},
        permuted=True,
    ),
    "qwen2": Architecture("qwen2", values={"use_sliding_window": True}),
    "qwen3": Architecture("qwen3", values={"use_sliding_window": True}),
    "qwen3moe": Architecture("qwen3_moe", values={"norm_topk_prob": True}),
    "gemma2": Architecture("gemma2", values={"sliding_window": 4096}, wide=46),
    "gemma3": Architecture("gemma3_text", wide=62),
    "phi3": Architecture("phi3", names=dataclasses.replace(GGUF, qkv="attn_qkv", gate_up="ffn_up")),
    "smollm3": Architecture("smollm3", permuted=True),
}
