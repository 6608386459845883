import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from directkv_jax.models import ModelConfig, Transformer, load
from directkv_jax.models.prefill import causal_attention

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_scaling": LLAMA3},
}


def llama3_frequencies(theta, size, scaling):
    """The cases of the original code, one frequency at a time."""
    result = []
    for i in range(0, size, 2):
        frequency = theta ** (-i / size)
        wavelength = 2 * math.pi / frequency
        context = scaling["original_max_position_embeddings"]
        if wavelength > context / scaling["low_freq_factor"]:
            frequency /= scaling["factor"]
        elif wavelength > context / scaling["high_freq_factor"]:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = (context / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        result.append(frequency)
    return np.array(result)


def assert_logits(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_and_decode_equal_numpy(name, tiny, tmp_path):
    config = tiny.config | VARIANTS[name]
    weights = tiny.random_weights(config, seed=3)
    model, _ = load(tiny.write_folder(tmp_path / "m", config, weights), "float32", progress=False)
    frequencies = llama3_frequencies(1000.0, 16, LLAMA3) if name == "llama3" else None
    rows = [np.random.default_rng(i).integers(0, 272, 20) for i in range(2)]
    expected = [tiny.numpy_logits(config, weights, row, frequencies) for row in rows]
    prompt_lengths, tokens = np.array([11, 5], np.int32), np.zeros((2, 16), np.int32)
    for b, n in enumerate(prompt_lengths):
        tokens[b, :n] = rows[b][:n]

    cache = model.create_cache(2, 32, page_size=16)
    graphdef, params = nnx.split(model)

    @functools.partial(jax.jit, donate_argnames="cache")
    def first(params, tokens, cache, lengths):
        return nnx.merge(graphdef, params).prefill(tokens, cache, lengths)

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(params, tokens, cache, lengths):
        return nnx.merge(graphdef, params)(tokens, cache, lengths)

    logits, cache = first(params, tokens, cache, prompt_lengths)
    for b, n in enumerate(prompt_lengths):
        assert_logits(logits[b], expected[b][n - 1])
    pointer = cache.parts[0].pages.unsafe_buffer_pointer()
    at = prompt_lengths.copy()
    for valid in ([3, 1], [1, 3], [0, 2], [2, 0]):  # ragged new tokens, three at most
        tokens = np.full((2, 3), 7, np.int32)
        for b, n in enumerate(valid):
            tokens[b, :n] = rows[b][at[b] : at[b] + n]
        logits, cache = step(params, tokens, cache, np.array(valid, np.int32))
        for b, n in enumerate(valid):
            assert_logits(logits[b, :n], expected[b][at[b] : at[b] + n])
        at += np.array(valid, np.int32)
    assert cache.lengths.tolist() == at.tolist()
    assert (
        cache.parts[0].pages.unsafe_buffer_pointer() == pointer
    )  # in place: the cache was donated
    assert jax.typeof(cache.parts[0].pages).memory_space == jax.memory.Space.Host


def test_float16_stays_close(tiny, folder):
    model, _ = load(folder, "float16", progress=False)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model))} == {"float16"}
    ids = np.arange(12, dtype=np.int32) * 7
    cache = model.create_cache(1, 16, page_size=16)
    assert cache.dtype == jnp.float16
    graphdef, params = nnx.split(model)
    prefill = jax.jit(
        lambda params, *rest: nnx.merge(graphdef, params).prefill(*rest), donate_argnums=2
    )
    logits, _ = prefill(params, ids[None], cache, jnp.array([12], jnp.int32))
    expected = tiny.numpy_logits(tiny.config, tiny.weights, ids)[-1]
    assert logits.dtype == jnp.float32
    error = np.abs(np.asarray(logits[0]) - expected).max() / np.abs(expected).max()
    assert error < 0.05


def test_random_projections_keep_the_variance_of_their_input(tiny):
    config = ModelConfig.from_dict(tiny.config | {"attention_bias": True})
    layer = Transformer(config, rngs=nnx.Rngs(0)).layers[0]
    packed = layer.attention.qkv_proj()
    assert packed.kernel.shape == (64, 2, 4, 16)
    assert not packed.bias.any()
    for kernel in (packed.kernel, layer.mlp.up_proj.kernel[...]):
        assert jnp.std(kernel) == pytest.approx(64**-0.5, rel=0.03)


def test_long_prompts_in_blocks_equal_the_whole(monkeypatch):
    monkeypatch.setattr("directkv_jax.models.prefill.QUERY_BLOCK", 64)
    tokens = 128
    key = jax.random.key(0)
    q, k, v = (
        jax.random.normal(jax.random.fold_in(key, i), (2, tokens, heads, 16))
        for i, heads in enumerate((4, 2, 2))
    )
    lengths = jnp.array([tokens - 3, 5], jnp.int32)
    blocks = jax.jit(causal_attention)(q, k, v, lengths)
    whole = jax.jit(jax.nn.dot_product_attention, static_argnames="is_causal")(
        q, k, v, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths
    )
    for b, n in enumerate(lengths.tolist()):
        np.testing.assert_allclose(blocks[b, :n], whole[b, :n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_prompts_attend_in_any_dtype_under_jit(dtype):
    q = jax.random.normal(jax.random.key(0), (1, 9, 4, 16))
    lengths = jnp.array([9], jnp.int32)
    low = jax.jit(causal_attention)(q.astype(dtype), *[q[:, :, :2].astype(dtype)] * 2, lengths)
    assert low.dtype == dtype
    exact = jax.jit(causal_attention)(q, *[q[:, :, :2]] * 2, lengths)
    np.testing.assert_allclose(low.astype(jnp.float32), exact, atol=0.03)


def rope_of(config):
    layer = config.layers[0]
    return layer.rope.resolve(layer.head_dim)


def test_llama3_frequencies_equal_the_original(tiny):
    config = ModelConfig.from_dict(tiny.config | {"rope_scaling": LLAMA3})
    expected = llama3_frequencies(1000.0, 16, LLAMA3)
    np.testing.assert_allclose(rope_of(config).frequencies, expected, rtol=1e-6)


def test_linear_scaling_and_both_places_of_theta(tiny):
    plain = {k: v for k, v in tiny.config.items() if k != "rope_theta"}
    parameters = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
    new = ModelConfig.from_dict(plain | {"rope_parameters": parameters})
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert new == ModelConfig.from_dict(plain | old)
    part = {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    assert rope_of(ModelConfig.from_dict(plain | {"rope_parameters": part})).rotary_dim == 8
    base = ModelConfig.from_dict(plain | {"rope_theta": 500.0})
    slow, fast = (np.array(rope_of(config).frequencies) for config in (new, base))
    np.testing.assert_allclose(4 * slow, fast, rtol=1e-6)


def test_defaults_follow_hugging_face(tiny):
    known = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    values = {name: tiny.config[name] for name in known} | {"num_attention_heads": 4}
    values["model_type"] = "llama"
    config = ModelConfig.from_dict(values | {"num_key_value_heads": None, "eos_token_id": [3, 4]})
    assert [(part.num_kv_heads, part.head_dim) for part in config.parts] == [(4, 16)]
    assert config.eos_token_id == (3, 4)
    assert hash(config) == hash(ModelConfig.from_dict(values | {"eos_token_id": (3, 4)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bloom"}, "`model_type` should be one of .*qwen2.*, but got 'bloom'"),
        ({"hidden_act": "mish"}, "`activation` should be one of .*, but got 'mish'"),
        ({"vocab_size": None}, "lacks `vocab_size`"),
        (
            {"num_hidden_layers": 0},
            "`num_hidden_layers` should be an int in .*, but got 0",
        ),
        ({"num_key_value_heads": 3}, r"\(N=4\) should be a multiple .* K=3"),
        ({"head_dim": 15}, "`head_dim` should be even, but got 15"),
        ({"rope_scaling": {"type": "ntk"}}, "`rope_type` should be one of .* 'ntk'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks `low_freq_factor`"),
    ],
)
def test_config_errors(change, message, tiny):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        ModelConfig.from_dict(tiny.config | change)
