"""A tiny random Llama checkpoint, its tokenizer, and the same model once more in NumPy."""

import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

CONFIG = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "bos_token_id": 270,
    "eos_token_id": 271,
    "some_key_of_the_future": 1,
}
SPECIAL = ["<|start|>", "<|end|>"]
MERGES = ["h e", "l l"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)


def vocabulary():
    """Tokens in the order of their ids: all bytes, two merges, special tokens at the end."""
    plain = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
    unused = [f"<unused{i}>" for i in range(CONFIG["vocab_size"] - len(plain) - len(SPECIAL))]
    return [*plain, *unused, *SPECIAL]


def make_tokenizer():
    vocab = {token: index for index, token in enumerate(vocabulary())}
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def random_weights(config, seed=0):
    """Float32 arrays under Hugging Face's names."""
    draw = np.random.default_rng(seed)
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows = config["num_attention_heads"] * size
    kv_rows = config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {
        "model.embed_tokens.weight": draw.normal(size=(config["vocab_size"], hidden)),
        "model.norm.weight": draw.uniform(0.5, 1.5, hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw.normal(size=(config["vocab_size"], hidden)) / 8
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = draw.uniform(0.5, 1.5, hidden)
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = draw.normal(size=shape) / np.sqrt(shape[1])
            flag = "attention_bias" if "attn" in name else "mlp_bias"
            if config.get(flag):
                weights[f"{prefix}{name}.bias"] = draw.normal(size=shape[0]) / 2
    return {name: value.astype(np.float32) for name, value in weights.items()}


def numpy_logits(config, weights, ids, frequencies=None):
    """Logits [T, vocabulary] of one sequence in float64; rotary pairs as complex numbers."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    size, tokens = config["head_dim"], len(ids)
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    if frequencies is None:
        frequencies = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * np.arange(tokens)[:, None, None] * frequencies)
    causal = np.tril(np.ones((tokens, tokens), bool))

    def norm(x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / scale * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotated(x):
        pairs = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = w["model.embed_tokens.weight"][list(ids)]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        y = norm(x, f"{block}.input_layernorm")
        q, k, v = (
            linear(y, f"{block}.self_attn.{name}_proj").reshape(tokens, -1, size) for name in "qkv"
        )
        q, k = rotated(q), np.repeat(rotated(k), groups, axis=1)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(size)
        scores = np.exp(np.where(causal, scores, -np.inf))
        scores /= scores.sum(-1, keepdims=True)
        y = np.einsum("nts,snh->tnh", scores, np.repeat(v, groups, axis=1)).reshape(tokens, -1)
        x = x + linear(y, f"{block}.self_attn.o_proj")
        y = norm(x, f"{block}.post_attention_layernorm")
        gate = linear(y, f"{block}.mlp.gate_proj")
        y = gate / (1 + np.exp(-gate)) * linear(y, f"{block}.mlp.up_proj")
        x = x + linear(y, f"{block}.mlp.down_proj")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return norm(x, "model.norm") @ w[f"{head}.weight"].T


def write_folder(path, config, weights, *, shards=1, chat_template=CHAT_TEMPLATE):
    """A Hugging Face folder; with several shards also their index."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    make_tokenizer().save(str(path / "tokenizer.json"))
    options = {"eos_token": {"content": "<|end|>"}, "chat_template": chat_template}
    (path / "tokenizer_config.json").write_text(json.dumps(options))
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[shard::shards]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def interleave(rows, heads):
    """The order of query and key rows in GGUF files, as llama.cpp's converter makes it."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(path, config, weights, *, arch="llama", quantize=None, metadata=None, extra=None):
    """A GGUF file of the same model. `metadata` exchanges or (None) removes keys."""
    writer = gguf.GGUFWriter(path, arch)
    tokens = vocabulary()
    values = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | (metadata or {})
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, value in weights.items():
        module, _, kind = name.rpartition(".")
        if "q_proj" in module or "k_proj" in module:
            key = "num_attention_heads" if "q_proj" in module else "num_key_value_heads"
            value = interleave(value, config[key])
        if module.startswith("model.layers."):
            layer, module = module.removeprefix("model.layers.").split(".", 1)
            name = f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"
        else:
            name = f"{_GGUF_NAMES[module]}.{kind}"
        if quantize is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny():
    """The builders above and one set of random weights."""
    return SimpleNamespace(
        config=CONFIG,
        weights=random_weights(CONFIG),
        random_weights=random_weights,
        numpy_logits=numpy_logits,
        write_folder=write_folder,
        write_gguf=write_gguf,
        interleave=interleave,
        make_tokenizer=make_tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def folder(tiny, tmp_path_factory):
    """A complete Hugging Face folder; not to be changed."""
    return tiny.write_folder(tmp_path_factory.mktemp("hf") / "tiny", tiny.config, tiny.weights)


@pytest.fixture(scope="session")
def loaded(folder):
    """(model, tokenizer) in float32."""
    from directkv_jax.models import load

    return load(folder, "float32", progress=False)
