"""Opens a GGUF file of the llama architecture; quantized tensors are expanded while loading."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from directkv_jax.models.checkpoint import Checkpoint, Tensor
from directkv_jax.models.config import LayerConfig, ModelConfig, RopeConfig
from directkv_jax.models.gguf_tokenizer import tokenizer_from_metadata

MAGIC = b"GGUF"

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_HF = {value: key for key, value in _TOP.items()}
_BLOCK_HF = {value: key for key, value in _BLOCK.items()}
_ROPE_FREQS = "rope_freqs.weight"


def open_gguf(path: Path) -> Checkpoint:
    """Opens a file without expanding any weights yet.

    Raises:
      ValueError: the file is truncated, of another format or for another architecture.
    """
    with path.open("rb") as file:
        if (magic := file.read(4)) != MAGIC:
            raise ValueError(
                f"{path} should start with {MAGIC!r} (GGUF), but starts with {magic!r}."
            )
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise ValueError(
            f"{path} should be a complete GGUF file, but is truncated or damaged ({error}). "
            "Copy or download it again."
        ) from error
    raw = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(metadata, raw)
        tokenizer = tokenizer_from_metadata(metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tensors = {
        _hf_name(name): _tensor(tensor, config)
        for name, tensor in raw.items()
        if name != _ROPE_FREQS
    }
    return Checkpoint(path, config, tensors, tokenizer, names=_gguf_name)


def _config(metadata: dict[str, Any], raw: dict[str, Any]) -> ModelConfig:
    if (kind := metadata.get("general.architecture")) != "llama":
        raise ValueError(f'`general.architecture` should be "llama", but got {kind!r}.')
    if metadata.get("llama.expert_count", 0):
        raise ValueError("mixtures of experts (`llama.expert_count`) are not supported.")
    if metadata.get("split.count", 1) > 1:
        raise ValueError("the file is one part of a split GGUF. Merge the parts first.")

    def required(key: str) -> Any:
        if key not in metadata:
            raise ValueError(f"the metadata lacks `{key}`.")
        return metadata[key]

    hidden, heads = required("llama.embedding_length"), required("llama.attention.head_count")
    embedding = raw.get("token_embd.weight")
    vocabulary = metadata.get("llama.vocab_size") or len(required("tokenizer.ggml.tokens"))
    if embedding is not None:
        vocabulary = int(embedding.shape[-1])
    head_dim = metadata.get("llama.attention.key_length") or hidden // heads
    rotary = metadata.get("llama.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ValueError(f"`llama.rope.dimension_count` should be {head_dim}, but got {rotary}.")
    scaling: tuple = ()
    if (kind := metadata.get("llama.rope.scaling.type", "none")) != "none":
        factor = metadata.get("llama.rope.scaling.factor", 1.0)
        if kind != "linear":
            raise ValueError(
                f'`llama.rope.scaling.type` should be "none" or "linear", but got {kind!r}.'
            )
        scaling = (("rope_type", kind), ("factor", factor))
    freqs = raw.get(_ROPE_FREQS)
    context = metadata.get("llama.context_length", 2048)
    rope = RopeConfig(
        metadata.get("llama.rope.freq_base", 10000.0),
        scaling,
        max_position=context,
        freq_divisors=() if freqs is None else tuple(map(float, _expand(freqs))),
    )
    layer = LayerConfig(
        heads,
        metadata.get("llama.attention.head_count_kv", heads),
        head_dim,
        required("llama.feed_forward_length"),
        rope,
    )
    return ModelConfig(
        family="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        layers=(layer,) * required("llama.block_count"),
        norm_eps=required("llama.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in raw,
        attention_bias="blk.0.attn_q.bias" in raw,
        output_bias="blk.0.attn_output.bias" in raw,
        mlp_bias="blk.0.ffn_up.bias" in raw,
        max_position_embeddings=context,
    )


def _tensor(tensor, config: ModelConfig) -> Tensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the fastest axis first
    heads = {
        "attn_q": config.layers[0].num_attention_heads,
        "attn_k": config.layers[0].num_key_value_heads,
    }.get(tensor.name.split(".")[-2])
    return Tensor(shape, functools.partial(_expand, tensor, heads))


def _expand(tensor, heads: int | None = None) -> np.ndarray:
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(
            f"`{tensor.name}` has the GGUF type {tensor.tensor_type.name}, which package `gguf` "
            "cannot expand. Take a file of another quantization."
        ) from error
    return values if heads is None else unpermute(values, heads)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the reordering of query and key rows in GGUF files.

    There the two rows of each rotary pair are neighbours (0, H/2, 1, H/2 + 1, ...); our rotation,
    as Hugging Face's, pairs row i with row i + H/2.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_HF:
        return f"model.layers.{parts[1]}.{_BLOCK_HF[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_HF:
        return f"{_TOP_HF[parts[0]]}.{parts[1]}"
    return name  # unknown: reported as unexpected


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    parts = module.split(".", 3)
    if parts[:2] == ["model", "layers"] and len(parts) == 4 and parts[3] in _BLOCK:
        return f"blk.{parts[2]}.{_BLOCK[parts[3]]}.{kind}"
    return name
