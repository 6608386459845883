"""GGUF files of every architecture hold the models of tests/data/parity."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from directkv_jax.models import families, load
from directkv_jax.models.checkpoint import Checkpoint, build
from directkv_jax.models.gguf import known_types, open_gguf
from directkv_jax.models.hf import open_tensors

sys.path.insert(0, str(Path(__file__).parent))
import gguf_writer

PARITY = Path(__file__).parents[1] / "data" / "parity"
# OPT is not among the architectures; the layers of SmolLM3 are below.
FOLDERS = [path for path in sorted(PARITY.iterdir()) if path.name not in ("opt", "smollm3")]
Kind = gguf.GGMLQuantizationType


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
def test_logits_equal_those_of_transformers(folder, tmp_path):
    path = gguf_writer.write(folder, tmp_path / "model.gguf")
    model, tokenizer = load(path, "float32", progress=False)
    held = load_file(folder / "expected.safetensors")
    np.testing.assert_allclose(
        logits_of(model, held["tokens"]), held["logits"],
        rtol=0, atol=2e-5 * np.abs(held["logits"]).max(),
    )  # fmt: skip
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_layers_without_positions_of_smollm3(tmp_path):
    # The format has no key for them: every fourth layer is one.
    folder = PARITY / "smollm3"
    path = gguf_writer.write(folder, tmp_path / "model.gguf")
    same_parameters(load(path, "float32", progress=False)[0], open_folder(folder))
    config = open_gguf(path).config
    assert [layer.rope is not None for layer in config.layers] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama-3.1", Kind.Q8_0), ("mixtral", Kind.Q4_0), ("phi-3", Kind.Q5_1), ("qwen3", Kind.BF16)],
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


def same_parameters(model, other):
    got, expected = (dict(nnx.to_flat_state(nnx.state(each))) for each in (model, other))
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(got[path][...], value[...], err_msg=str(path))
