"""Makes tests/data/parity: tiny random checkpoints, and their logits by Hugging Face transformers.

    pip install "directkv-jax[parity]"; python scripts/parity_fixtures.py [NAME...]

Each folder holds `config.json` and `model.safetensors` as transformers saves them, the weights
rounded to bfloat16, and `expected.safetensors`: int32 `tokens` [S], and float32 [S, vocabulary]
`logits` of a float32 run and `logits_bfloat16` of a bfloat16 one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

TARGET = Path(__file__).parents[1] / "tests" / "data" / "parity"
TOKENS = 40
SMALL = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": [2, 3],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e3, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e3, "partial_rotary_factor": 0.5,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.3 * i for i in range(16)], "original_max_position_embeddings": 16,
}  # fmt: skip
# name: (model_type, what differs from SMALL)
CASES = {
    "llama-2": ("llama", {"num_key_value_heads": 2, "eos_token_id": 2}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama-biases-tied": (
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "smollm2": (
        "llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "hidden_size": 48}
    ),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma-2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 48}),
    "gemma-3": (
        "gemma3_text",
        {"sliding_window": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 48,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
         }},
    ),
    "phi-3": ("phi3", {"sliding_window": 24}),
    "phi-3-long": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16, "hidden_size": 64,
         "num_attention_heads": 1},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "opt": (
        "opt",
        {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 1, "word_embed_proj_dim": 64},
    ),
}  # fmt: skip


def main() -> None:
    """Makes the folders named, or all."""
    for seed, (name, (kind, changes)) in enumerate(CASES.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name, kind, changes, seed)


def make(name: str, kind: str, changes: dict, seed: int) -> None:
    """Makes one folder."""
    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING[kind](**{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    offset = 1.0 if kind.startswith("gemma") else 0.0
    for key, value in model.named_parameters():
        value.data = draw(key, value, offset).bfloat16().float()
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        exact = model(tokens).logits[0]
    folder = TARGET / name
    folder.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Loaded anew: its frequencies are float32 then.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        rounded = model(tokens).logits[0].float()
    expected = {"tokens": tokens[0].int(), "logits": exact, "logits_bfloat16": rounded}
    save_file(expected, folder / "expected.safetensors")
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir()) >> 10} KiB, "
          f"largest logit {exact.abs().max():.2f}")  # fmt: skip


def draw(name: str, like: torch.Tensor, offset: float) -> torch.Tensor:
    """Random values that make every part of the model count."""
    if "norm" in name and name.endswith("weight"):
        return torch.empty_like(like).uniform_(0.5, 1.5) - offset
    if like.ndim == 1:
        return 0.5 * torch.randn_like(like)
    if "embed" in name:
        return 0.5 * torch.randn_like(like)
    return torch.randn_like(like) * like.shape[-1] ** -0.5


if __name__ == "__main__":
    main()
