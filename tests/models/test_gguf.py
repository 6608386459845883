"""GGUF files of every architecture hold the models of tests/data/parity."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gguf
import gguf_writer
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from directkv_jax.models import families, load
from directkv_jax.models.checkpoint import Checkpoint, build
from directkv_jax.models.gguf import known_types, open_gguf, unpermute
from directkv_jax.models.hf import open_tensors

PARITY = Path(__file__).parents[1] / "data" / "parity"
# OPT is not among the architectures; the layers of SmolLM3 are below.
FOLDERS = [path for path in sorted(PARITY.iterdir()) if path.name not in ("opt", "smollm3")]
Kind = gguf.GGMLQuantizationType
IDS = np.array([1, 5, 9, 200, 33, 271, 7, 7], np.int32)


def open_folder(folder: Path, **changes):
    values = json.loads((folder / "config.json").read_text()) | changes
    family, (tensors, _) = families.find(values), open_tensors(folder)
    checkpoint = Checkpoint(folder, family.config(values), tensors, None, layout=family.names)
    return build(checkpoint, "float32", progress=False)


def logits_of(model, tokens):
    """float32 [S, vocabulary]."""
    graphdef, params = nnx.split(model)
    cache = model.create_cache(1, 48, page_size=16, placement="host")
    step = jax.jit(
        lambda params, tokens, cache: nnx.merge(graphdef, params)(tokens, cache),
        donate_argnums=2,
    )
    with jax.default_matmul_precision("highest"):
        return np.asarray(step(params, tokens[None], cache)[0][0])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_configuration_is_that_of_the_folder(folder, tmp_path):
    opened = open_gguf(gguf_writer.write(folder, tmp_path / "model.gguf"))
    config = json.loads((folder / "config.json").read_text())
    assert described(opened.config) == described(families.find(config).config(config))
    assert opened.tokenizer.decode(opened.tokenizer.encode("ab")) == "ab"
    assert (opened.tokenizer.bos_id, opened.tokenizer.eos_ids) == (1, (2,))


# One of each architecture.
@pytest.mark.parametrize(
    "name",
    ["llama-3.1", "mixtral", "qwen2-window", "qwen3", "qwen3-moe", "gemma-2", "gemma-3",
     "phi-3-long"],
)  # fmt: skip
def test_logits_equal_those_of_transformers(name, tmp_path):
    path = gguf_writer.write(PARITY / name, tmp_path / "model.gguf")
    model = load(path, "float32", progress=False)[0]
    held = load_file(PARITY / name / "expected.safetensors")
    np.testing.assert_allclose(
        logits_of(model, held["tokens"]), held["logits"],
        rtol=0, atol=2e-5 * np.abs(held["logits"]).max(),
    )  # fmt: skip


def test_layers_without_positions_of_smollm3(tmp_path):
    # The format has no key for them: every fourth layer is one.
    folder = PARITY / "smollm3"
    path = gguf_writer.write(folder, tmp_path / "model.gguf")
    same_parameters(load(path, "float32", progress=False)[0], open_folder(folder))
    config = open_gguf(path).config
    assert [layer.rope is not None for layer in config.layers] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama-biases-tied", Kind.Q8_0), ("mixtral", Kind.Q4_0), ("phi-3", Kind.Q5_1)],
)
def test_quantized_weights_are_expanded(name, kind, tmp_path):
    path = gguf_writer.write(PARITY / name, tmp_path / "model.gguf", kind=kind)
    _, weights = gguf_writer.read_folder(PARITY / name)
    for key, value in weights.items():
        if gguf_writer.quantizable(value, kind):
            weights[key] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((PARITY / name / "config.json").read_bytes())
    same_parameters(load(path, "float32", progress=False)[0], open_folder(tmp_path))


def test_every_type_that_is_known_is_expanded(tmp_path):
    draw = np.random.default_rng(0)  # bytes below 60 make scales that are finite
    raw = {
        kind.name: draw.integers(0, 60, (3, 2 * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        for kind in known_types()
    }
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"} <= raw.keys()
    folder = PARITY / "llama-2"
    extra = [(name, data, Kind[name]) for name, data in raw.items()]
    tensors = open_gguf(gguf_writer.write(folder, tmp_path / "m.gguf", extra=extra)).tensors
    for name, data in raw.items():
        expected = gguf.quants.dequantize(data, Kind[name])
        np.testing.assert_array_equal(tensors[name].read(), expected)
        assert tensors[name].shape == expected.shape


def test_frequency_divisors_of_a_gguf(tiny, tmp_path):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, tiny.config, tiny.weights, extra={"rope_freqs.weight": divisors})
    frequencies = 1000.0 ** (-np.arange(0, 16, 2) / 16) / divisors
    logits = logits_of(load(path, "float32", progress=False)[0], IDS)
    reference = tiny.numpy_logits(tiny.config, tiny.weights, IDS, frequencies)
    np.testing.assert_allclose(logits, reference, rtol=2e-4, atol=2e-4)


def test_unpermute_undoes_the_order_of_gguf(tiny):
    rows = np.arange(4 * 16 * 3).reshape(64, 3)
    np.testing.assert_array_equal(unpermute(tiny.interleave(rows, 4), 4), rows)


def same_parameters(model, other):
    got, expected = (dict(nnx.to_flat_state(nnx.state(each))) for each in (model, other))
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(got[path][...], value[...], err_msg=str(path))


def described(config):
    """All that counts; numbers to the six digits that float32 metadata keeps, ropes resolved."""
    layers = []
    for layer in config.layers:
        resolved = None
        if layer.rope is not None:
            rope = layer.rope.resolve(layer.head_dim, 48)
            resolved = [f"{value:.5e}" for value in (*rope.frequencies, rope.factor)]
        layers.append((dataclasses.replace(layer, rope=None), resolved))
    fields = dataclasses.asdict(config)
    for name in ("layers", "family", "eos_token_id"):  # files of GGUF name one end
        del fields[name]
    scale = fields.pop("attention_scale") or config.layers[0].head_dim ** -0.5
    numbers = {k: f"{v:.5e}" if isinstance(v, float) else v for k, v in fields.items()}
    return layers, numbers, f"{scale:.5e}"
