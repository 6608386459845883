"""Folders of models that also see images: the text model is loaded, the rest left alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

from directkv_jax.models import ModelConfig, load

TEXT = Path(__file__).parents[1] / "data" / "parity" / "gemma-3"
VISION = ("vision_tower.vision_model.post_layernorm", "multi_modal_projector.mm_soft_emb_norm")


def write(folder: Path, config, weights) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors")
    return folder


def multimodal(prefix: str, tower: str):
    """The configuration and the weights of tests/data/parity/gemma-3 inside of another model."""
    config = {
        "model_type": "gemma3", "text_config": json.loads((TEXT / "config.json").read_text()),
        "vision_config": {"model_type": "siglip_vision_model"},
    }  # fmt: skip
    weights = {
        name.replace("model.", prefix, 1): value
        for name, value in load_file(TEXT / "model.safetensors").items()
    }
    tensors = {f"{tower}{name}.weight": np.ones(5, np.float32) for name in VISION}
    return config, weights | tensors


@pytest.mark.parametrize(
    ("prefix", "tower"), [("language_model.model.", ""), ("model.language_model.", "model.")]
)
def test_the_text_model_of_either_spelling(prefix, tower, tmp_path):
    plain = json.loads((TEXT / "config.json").read_text())
    other = write(tmp_path / "text", plain, load_file(TEXT / "model.safetensors"))
    model, _ = load(write(tmp_path / "both", *multimodal(prefix, tower)), "float32", progress=False)
    expected = nnx.state(load(other, "float32", progress=False)[0])
    for got, wanted in zip(*(nnx.to_flat_state(each) for each in (nnx.state(model), expected)),
                           strict=True):  # fmt: skip
        assert got[0] == wanted[0]
        np.testing.assert_array_equal(got[1][...], wanted[1][...])
    assert model.config.layers == ModelConfig.from_dict(plain).layers


def test_tensors_that_are_missing_have_the_name_of_the_file(tmp_path):
    config, weights = multimodal("language_model.model.", "")
    del weights["language_model.model.norm.weight"]
    weights["language_model.model.odd.weight"] = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="2 problems") as error:
        load(write(tmp_path / "both", config, weights), progress=False)
    assert "missing: `language_model.model.norm.weight`" in str(error.value)
    assert "unexpected: `language_model.model.odd.weight`" in str(error.value)


def test_what_published_configurations_leave_out():
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "model_type": "gemma3_text", "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    ends = {"eos_token_id": [1, 106]}
    model = ModelConfig.from_dict({"model_type": "gemma3", "text_config": text, **ends})
    layer = model.layers[5]
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (8, 4, 256)
    assert (model.vocab_size, model.bos_token_id, model.eos_token_id) == (262208, 2, (1, 106))
    assert [each.window for each in model.layers[:6]] == [1024] * 5 + [None]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "lacks `text_config`"),
        ({"text_config": 3}, "`text_config` should be a mapping, but got"),
        ({"text_config": {}}, "lacks `hidden_size`, `intermediate_size`, `num_hidden_layers`"),
    ],
)
def test_errors(config, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({"model_type": "gemma3", **config})
