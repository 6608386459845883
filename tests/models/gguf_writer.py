"""Writes a Hugging Face folder as GGUF, as the converter of llama.cpp lays such files out."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import gguf
import numpy as np
from gguf import MODEL_ARCH
from safetensors.numpy import load_file

ARCHS = {
    "llama": MODEL_ARCH.LLAMA, "mistral": MODEL_ARCH.LLAMA, "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3, "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma2": MODEL_ARCH.GEMMA2, "gemma3_text": MODEL_ARCH.GEMMA3, "phi3": MODEL_ARCH.PHI3,
    "smollm3": MODEL_ARCH.SMOLLM3,
}  # fmt: skip
PERMUTED = (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3)
PRE = {MODEL_ARCH.LLAMA: "llama-bpe", MODEL_ARCH.SMOLLM3: "smaug-bpe"}
SENTENCEPIECE = (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3, MODEL_ARCH.PHI3)


def read_folder(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The configuration and the weights, in float32."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    return config, {name: value.astype(np.float32) for name, value in weights.items()}


def write(folder: Path, path: Path, *, kind=None, vocabulary=None, extra=()) -> Path:
    """A GGUF file of the folder, F32 or, where rows allow it, of the type `kind`.

    Args:
      folder: with `config.json` and one file of weights.
      path: to write.
      kind: a `gguf.GGMLQuantizationType`.
      vocabulary: number of tokens of the tokenizer, or None for those of the configuration.
      extra: more tensors: name, array and type (None: that of the array).
    """
    config, weights = read_folder(folder)
    arch = ARCHS[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_shapes(writer, config)
    _add_attention(writer, config)
    _add_rope(writer, config)
    _add_tokenizer(writer, arch, vocabulary or config["vocab_size"])
    for name, value in _converted(arch, config, weights).items():
        if quantizable(value, kind):
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    for name, value, raw in extra:
        writer.add_tensor(name, value, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantizable(value: np.ndarray, kind) -> bool:
    """Whether the rows of a matrix are whole blocks of a type."""
    return kind is not None and value.ndim > 1 and value.shape[-1] % 32 == 0


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The two rows of each rotary pair beside each other."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _add_shapes(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["hidden_size"] != config["num_attention_heads"] * config["head_dim"]:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_attention(writer: gguf.GGUFWriter, config: dict) -> None:
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"] or 0)
    kinds = config.get("layer_types", [])
    if len(set(kinds)) > 1:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if "query_pre_attn_scalar" in config:  # left out of files whose scale is the usual one
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_rope(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config["rope_parameters"]
    if "sliding_attention" in rope:
        writer.add_float32(
            f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"]
        )
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(
        int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    )
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        trained = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(trained)
        extension = config["max_position_embeddings"] / trained
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(extension) / math.log(trained)))


def _add_tokenizer(writer: gguf.GGUFWriter, arch: MODEL_ARCH, count: int) -> None:
    special = ["<unk>", "<s>", "</s>"]
    plain = ["\u2581", "a", "b", "ab", *(f"<unused{i}>" for i in range(count - 7))]
    writer.add_token_types([2, 3, 3] + [1] * len(plain))
    writer.add_token_list([*special, *plain])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if arch in SENTENCEPIECE:
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix(arch == MODEL_ARCH.PHI3)
        writer.add_token_scores([-float(index) for index in range(count)])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(PRE.get(arch, "qwen2"))
        writer.add_token_merges(["a b"])


def _converted(arch: MODEL_ARCH, config: dict, weights: dict) -> dict[str, np.ndarray]:
    """The tensors of the file by their names there."""
    layers = config["num_hidden_layers"]
    # Layers without experts have the names of the model without experts.
    archs = [arch, *([MODEL_ARCH.QWEN3] if arch == MODEL_ARCH.QWEN3MOE else [])]
    maps = [gguf.get_tensor_name_map(each, layers) for each in archs]
    converted, stacks = {}, {}
    for name, value in weights.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name):
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = value
            continue
        if arch in PERMUTED and re.search(r"\.[qk]_proj\.", name):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            value = interleave(value, config[key])
        if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        converted[_name(maps, name)] = value
    for name, experts in stacks.items():
        converted[_name(maps, name)] = np.stack([experts[e] for e in range(len(experts))])
    return {**converted, **_factors(config)}


def _name(maps, name: str) -> str:
    found = (each.get_name(name, try_suffixes=(".weight", ".bias")) for each in maps)
    return next(filter(None, found))


def _factors(config: dict) -> dict[str, np.ndarray]:
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    size, trained = config["head_dim"], rope["original_max_position_embeddings"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((trained / waves - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)}
