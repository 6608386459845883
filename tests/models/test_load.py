import json
import pickle
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from directkv_jax.models import generate, load

IDS = np.array([[1, 5, 9, 200, 33, 271, 7, 7]], np.int32)


def last_logits(model):
    cache = model.create_cache(1, 16, page_size=16)
    graphdef, params = nnx.split(model)
    prefill = jax.jit(
        lambda params, *rest: nnx.merge(graphdef, params).prefill(*rest), donate_argnums=2
    )
    return np.asarray(prefill(params, IDS, cache, jnp.array([IDS.shape[1]]))[0][0])


def quietly(path):
    return load(path, "float32", progress=False)


@pytest.fixture(scope="module")
def expected(loaded):
    return last_logits(loaded[0])


@pytest.fixture
def fresh(tiny, tmp_path):
    """A folder a test may damage."""
    return tiny.write_folder(tmp_path / "tiny", tiny.config, tiny.weights)


# What loads


def change_json(file, **changes):
    """Other values in a file, which need not be there."""
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | changes))


def test_folder_gives_the_numpy_logits(tiny, expected):
    reference = tiny.numpy_logits(tiny.config, tiny.weights, IDS[0])[-1]
    np.testing.assert_allclose(expected, reference, rtol=2e-4, atol=2e-4)


def test_shards_give_the_same(tiny, tmp_path, expected):
    folder = tiny.write_folder(tmp_path / "sharded", tiny.config, tiny.weights, shards=3)
    np.testing.assert_array_equal(last_logits(quietly(folder)[0]), expected)


def test_gguf_gives_the_same(tiny, tmp_path, expected):
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.config, tiny.weights)
    model, tokenizer = quietly(path)
    np.testing.assert_allclose(last_logits(model), expected, rtol=1e-5, atol=1e-5)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (270, (271,))


def test_bfloat16_files_and_the_default_dtype(tiny, tmp_path):
    weights = {name: value.astype(jnp.bfloat16) for name, value in tiny.weights.items()}
    folder = tiny.write_folder(tmp_path / "bf16", tiny.config, weights)
    model, _ = load(folder, progress=False)
    assert model.dtype == jnp.float32  # on a CPU
    kernel = model.layers[0].mlp.up_proj.kernel[...]
    stored = weights["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(kernel, stored.T)


def test_harmless_extra_tensors_are_ignored(tiny, tmp_path):
    config = tiny.config | {"tie_word_embeddings": True}
    weights = tiny.random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    quietly(tiny.write_folder(tmp_path / "tied", config, weights))


# What does not


def test_all_problems_in_one_error(tiny, tmp_path):
    weights = dict(tiny.weights)
    del weights["model.norm.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((96, 63), np.float32)
    weights["model.layers.1.extra.weight"] = np.zeros(5, np.float32)
    weights["model.layers.1.mlp.up_proj.weight"] = np.zeros((96, 64), np.int8)
    weights["model.layers.1.self_attn.k_proj.weight"] = np.zeros((64, 64), np.float32)
    del weights["model.layers.0.self_attn.v_proj.weight"]
    folder = tiny.write_folder(tmp_path / "bad", tiny.config, weights)
    with pytest.raises(ValueError, match="6 problems") as error:
        quietly(folder)
    for line in (
        "missing: `model.norm.weight`, expected shape (64,)",
        "missing: `model.layers.0.self_attn.v_proj.weight`, expected shape (32, 64)",
        "mis-shaped: `model.layers.1.self_attn.k_proj.weight`, expected (32, 64), got (64, 64)",
        "mis-shaped: `model.layers.0.mlp.up_proj.weight`, expected (96, 64), got (96, 63)",
        "unexpected: `model.layers.1.extra.weight`, got shape (5,)",
        "dtype: `model.layers.1.mlp.up_proj.weight`, expected one of BF16, F16, F32, F64, got I8",
    ):
        assert line in str(error.value)


def test_missing_and_foreign_shards(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path / "sharded", tiny.config, tiny.weights, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="do not fit") as error:
        quietly(folder)
    assert "`model-00002-of-00003.safetensors` is missing" in str(error.value)
    assert "`../elsewhere.safetensors` should be a plain file name" in str(error.value)
    assert "missing: `model.norm.weight`" in str(error.value)


def test_a_truncated_shard(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path / "sharded", tiny.config, tiny.weights, shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors should be a complete"):
        quietly(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [("{", "should be JSON"), ('{"weight_map": []}', "should hold `weight_map`, a mapping")],
)
def test_an_index_that_cannot_be_read(index, message, tiny, tmp_path):
    folder = tiny.write_folder(tmp_path / "sharded", tiny.config, tiny.weights, shards=3)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        quietly(folder)


@pytest.mark.parametrize("kind", ["int8", "int32", "uint8", "bool"])
def test_weights_that_are_no_numbers_of_a_model(kind, tiny, tmp_path):
    weights = {name: value.astype(kind) for name, value in tiny.weights.items()}
    folder = tiny.write_folder(tmp_path / "whole", tiny.config, weights)
    with pytest.raises(ValueError, match=r"dtype: `.*`, expected one of BF16, F16, F32, F64, got"):
        quietly(folder)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"hidden_size": 72}, "mis-shaped: `lm_head.weight`, expected (272, 72), got (272, 64)"),
        ({"vocab_size": 280}, "`model.embed_tokens.weight`, expected (280, 64), got (272, 64)"),
        ({"num_key_value_heads": 4}, "`model.layers.0.self_attn.k_proj.weight`, expected (64, 64)"),
        ({"attention_bias": True}, "missing: `model.layers.1.self_attn.o_proj.bias`, expected"),
        ({"model_type": "qwen3"}, "missing: `model.layers.0.self_attn.q_norm.weight`, expected"),
        ({"num_hidden_layers": 1}, "unexpected: `model.layers.1.mlp.up_proj.weight`, got shape"),
    ],
)
def test_a_configuration_of_another_model(changes, line, tiny, tmp_path):
    folder = tiny.write_folder(tmp_path / "other", tiny.config | changes, tiny.weights)
    with pytest.raises(ValueError, match="do not fit its configuration") as error:
        quietly(folder)
    assert line in str(error.value)


@pytest.mark.parametrize("count", [2001 * 10**6, "2", 0])
def test_layers_that_no_model_has(count, fresh):
    change_json(fresh / "config.json", num_hidden_layers=count)
    with pytest.raises(ValueError, match="`num_hidden_layers` should be"):
        quietly(fresh)


def test_a_configuration_that_is_nested_too_deep(fresh):
    (fresh / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json should be JSON, but"):
        quietly(fresh)


def test_a_number_that_is_too_long_for_python(fresh):
    (fresh / "config.json").write_text('{"vocab_size": ' + "1" * 5000 + "}")
    with pytest.raises(ValueError, match=r"config.json should be JSON, but"):
        quietly(fresh)


def test_a_quantization_of_none(fresh):
    change_json(fresh / "config.json", quantization_config=None)
    quietly(fresh)
    change_json(fresh / "config.json", quantization_config={"bits": 4})
    with pytest.raises(ValueError, match="holds quantized weights"):
        quietly(fresh)


def test_an_output_that_is_the_embedding_and_is_not(tiny, tmp_path, expected):
    """A file may hold both; a copy is fine, another one contradicts the configuration."""
    weights = dict(tiny.weights)
    config = tiny.config | {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match=r"`lm_head.weight` differs from the embedding"):
        quietly(tiny.write_folder(tmp_path / "other", config, weights))
    copy = weights["model.embed_tokens.weight"].copy()
    copy[3] = np.nan  # a row of no token
    for head in (copy, copy.astype(ml_dtypes.bfloat16)):
        weights |= {"model.embed_tokens.weight": copy, "lm_head.weight": head}
        quietly(tiny.write_folder(tmp_path / "copy", config, weights))


def test_ids_beyond_the_embedding(fresh):
    tokenizer = json.loads((fresh / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["far"] = 5000
    (fresh / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"the tokenizer knows 5001 tokens, but .* has 272 rows"):
        quietly(fresh)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("generation_config.json", {"eos_token_id": "271"}),
        ("generation_config.json", {"eos_token_id": [1.5]}),
        ("tokenizer_config.json", {"bos_token": {"id": 3}}),
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": ["x"]}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 5}]}),
    ],
)
def test_damaged_files_beside_the_weights(file, changes, fresh):
    change_json(fresh / file, **changes)
    with pytest.raises(ValueError, match=f"{re.escape(str(fresh / file))}: .* should be"):
        quietly(fresh)


def change_tokenizer(folder, change):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_prompts_are_neither_cut_nor_padded(fresh, loaded):
    """As the files of many fine-tunings say."""
    cut = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    change_tokenizer(fresh, lambda values: values.update(truncation=cut, padding=pad))
    tokenizer = quietly(fresh)[1]
    for text in ("hello", "hello " * 100):
        assert tokenizer.encode(text) == loaded[1].encode(text)


def test_added_tokens_may_have_no_row(fresh, tiny):
    """Gemma 3's of 1B has one for images, beyond an embedding that it never saw."""
    rows, extra = tiny.config["vocab_size"], {"content": "<image>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    change_tokenizer(fresh, lambda v: v["added_tokens"].append({"id": rows, **extra, **flags}))
    with pytest.warns(UserWarning, match=r"adds 1 tokens .* \(<image>\)"):
        model, tokenizer = quietly(fresh)
    with pytest.raises(ValueError, match=r"should hold token ids in \[0, 272\)"):
        generate(model, tokenizer, "<image>")


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "BPE"}},
        {"model": None},
    ],
    ids=repr,
)
def test_damaged_tokenizers(fresh, change):
    change_tokenizer(fresh, lambda values: values.update(change))
    with pytest.raises(ValueError, match=r"tokenizer.json could not be read as a tokenizer"):
        quietly(fresh)


def test_dtypes_are_named(fresh):
    for dtype in ("bf16", "int8", 5):
        with pytest.raises(ValueError, match="`dtype` should be one of bfloat16, float16, float32"):
            load(fresh, dtype, progress=False)


def test_a_chat_template_that_is_no_text(fresh):
    (fresh / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja: .* can't decode"):
        quietly(fresh)


def test_long_lists_are_shortened(tiny, tmp_path):
    config = tiny.config | {"num_hidden_layers": 9}
    folder = tiny.write_folder(tmp_path / "deep", config, tiny.weights)
    with pytest.raises(ValueError, match="missing: and 43 more"):
        quietly(folder)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("content", ["truncated", "pickle", "empty", "gguf"])
def test_weights_that_are_not_safetensors(content, fresh):
    file = fresh / "model.safetensors"
    file.write_bytes(
        {
            "truncated": file.read_bytes()[:-100],
            "pickle": pickle.dumps(Bomb()),
            "empty": b"",
            "gguf": b"GGUF" + bytes(100),
        }[content]
    )
    with pytest.raises(ValueError, match="should be a complete safetensors file"):
        quietly(fresh)


def test_pickled_weights_are_not_opened(fresh):
    (fresh / "model.safetensors").unlink()
    (fresh / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(FileNotFoundError, match=r"pickled .*pytorch_model.bin.*safetensors"):
        quietly(fresh)


@pytest.mark.parametrize(
    ("name", "text", "kind", "message"),
    [
        ("config.json", None, FileNotFoundError, "should hold `config.json`"),
        ("config.json", "{", ValueError, "should be JSON"),
        ("config.json", "[]", ValueError, "should hold a JSON object, but got list"),
        (
            "config.json",
            '{"model_type": "bert"}',
            ValueError,
            "`model_type` should be one of gemma2, gemma3, .*smollm3, but got 'bert'",
        ),
        ("config.json", '{"quantization_config": {}}', ValueError, "quantized weights"),
        ("tokenizer.json", None, FileNotFoundError, "should hold `tokenizer.json`"),
        ("tokenizer.json", '{"a": 1}', ValueError, "could not be read as a tokenizer"),
    ],
)
def test_other_files_of_the_folder(name, text, kind, message, fresh):
    if text is None:
        (fresh / name).unlink()
    else:
        (fresh / name).write_text(text)
    with pytest.raises(kind, match=message):
        quietly(fresh)


def test_a_tokenizer_of_another_model(tiny, tmp_path):
    config = tiny.config | {"vocab_size": 100}
    folder = tiny.write_folder(tmp_path / "small", config, tiny.random_weights(config))
    with pytest.raises(ValueError, match="knows 272 tokens, but the embedding has 100 rows"):
        quietly(folder)


def test_files_that_are_not_gguf(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none"))):
        quietly(tmp_path / "none")
    path = tmp_path / "model.gguf"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"should start with b'GGUF' .*, but starts with"):
        quietly(path)
    save_file(tiny.weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"Pass the folder that holds `config\.json`"):
        quietly(tmp_path / "model.safetensors")
