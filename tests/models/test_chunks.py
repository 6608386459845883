"""Prompts read in chunks give what they give when read at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from directkv_jax.models import ModelConfig, complete, load
from directkv_jax.models.decoding import Decoder
from directkv_jax.models.reading import PromptReader, _prefill_layer
from directkv_jax.models.sizes import chunk_sizes, chunk_tokens, layer_bytes

LENGTHS = np.array([131, 3, 70], np.int32)


def prompts(total):
    tokens = np.zeros((len(LENGTHS), total), np.int32)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = np.random.default_rng(row).integers(0, 272, length)
    return tokens


def read(model, chunk, placement="host", implementation="cpu"):
    """(logits after each prompt, keys and values of each row, page table)."""
    chunks = chunk_sizes(int(LENGTHS.max()), chunk)
    cache = model.create_cache(len(LENGTHS), 192, page_size=16, placement=placement)
    pointer = cache.parts[0].pages.unsafe_buffer_pointer()
    last, cache = PromptReader(model, implementation).read(
        jnp.asarray(prompts(sum(chunks))), jnp.asarray(LENGTHS), chunks, cache
    )
    (part,) = cache.parts  # all layers are alike
    assert part.pages.unsafe_buffer_pointer() == pointer  # in place: the cache was donated
    assert cache.lengths.tolist() == LENGTHS.tolist()
    assert not cache.overflowed.any()
    layers = range(cache.num_layers)
    stored = [
        np.stack([part.gather(i, row, 0, n) for i in layers]) for row, n in enumerate(LENGTHS)
    ]
    return np.asarray(model.logits(last)), stored, np.asarray(part.page_table)


@pytest.fixture(scope="module")
def whole(loaded):
    return read(loaded[0], 1024)


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("chunk", "placement", "implementation"),
    [
        (1, "host", "cpu"),
        (7, "host", "cpu"),
        (64, "host", "cpu"),
        (500, "host", "cpu"),
        (7, "device", "cpu"),
        (64, "host", "xla"),
    ],
)
def test_chunks_give_the_logits_and_the_cache_of_the_whole(
    chunk, placement, implementation, loaded, whole
):
    logits, stored, page_table = read(loaded[0], chunk, placement, implementation)
    assert_close(logits, whole[0])
    for got, expected in zip(stored, whole[1], strict=True):
        assert_close(got, expected)
    np.testing.assert_array_equal(page_table, whole[2])


def test_the_whole_gives_the_numpy_logits(tiny, whole):
    for row, length in enumerate(LENGTHS):
        ids = prompts(192)[row, :length]
        assert_close(whole[0][row], tiny.numpy_logits(tiny.config, tiny.weights, ids)[-1])


def test_bfloat16_errs_no_more_in_chunks(folder, whole):
    model, _ = load(folder, "bfloat16", progress=False)
    errors = [np.abs(read(model, chunk)[0] - whole[0]).max() for chunk in (1024, 64)]
    assert 0 < errors[1] < 2 * errors[0]


def test_greedy_tokens(loaded):
    rows = [row[:n].tolist() for row, n in zip(prompts(192), LENGTHS, strict=True)]
    expected = complete(*loaded, rows, max_new_tokens=8, stop_tokens=())
    assert (expected.stats.prefill_chunk, expected.stats.prefill_chunks) == (256, 1)
    for option, chunk in (({"prefill_chunk": 64}, 64), ({"prefill_bytes": 1}, 16)):
        got = complete(*loaded, rows, max_new_tokens=8, stop_tokens=(), **option)
        assert got.tokens == expected.tokens
        assert got.stats.prefill_chunk == chunk
        assert got.stats.prefill_chunks == -(-131 // chunk)


def test_a_loop_of_ones_own(loaded, whole):
    model, chunk = loaded[0], 48
    graphdef, params = nnx.split(model)
    tokens, expected = prompts(144), whole[0]

    @functools.partial(jax.jit, donate_argnames="cache", static_argnames="name")
    def call(params, tokens, cache, valid, name):
        return getattr(nnx.merge(graphdef, params), name)(tokens, cache, valid)

    for name in ("read", "__call__"):
        cache = model.create_cache(len(LENGTHS), 192, page_size=16)
        logits = np.zeros_like(expected)
        for start in range(0, tokens.shape[1], chunk):
            valid = np.clip(LENGTHS - start, 0, chunk)
            new, cache = call(params, tokens[:, start : start + chunk], cache, valid, name)
            if name == "__call__":
                new = np.take_along_axis(new, np.maximum(valid - 1, 0)[:, None, None], 1)[:, 0]
            logits = np.where(valid[:, None] > 0, new, logits)
        assert_close(logits, expected)
        assert cache.lengths.tolist() == LENGTHS.tolist()


def test_each_size_is_compiled_once_and_beforehand(loaded, compilations, monkeypatch):
    late, prefill = [], Decoder.prefill

    def counting(*arguments):
        before = compilations()
        result = prefill(*arguments)
        late.append(compilations() - before)
        return result

    monkeypatch.setattr(Decoder, "prefill", counting)
    before = _prefill_layer._cache_size()
    options = {"max_new_tokens": 2, "max_length": 128, "prefill_chunk": 24}
    complete(*loaded, [[5] * 106, [6]], **options)  # 24 four times, and 16
    assert _prefill_layer._cache_size() == before + 3  # the first 24, the others, and 16
    complete(*loaded, [[7] * 58, [8] * 30], **options)  # 24 twice, and 16
    assert late == [0, 0]
    assert _prefill_layer._cache_size() == before + 3


def test_progress_counts_layers_of_all_chunks(loaded):
    seen = []
    complete(
        *loaded, [[5] * 40], max_new_tokens=2, prefill_chunk=16,
        on_progress=lambda *at: seen.append(at),
    )  # fmt: skip
    assert seen == [(done, 6) for done in range(7)]


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "64"])
@pytest.mark.parametrize("name", ["prefill_chunk", "prefill_bytes"])
def test_bad_options(name, value, loaded):
    with pytest.raises(ValueError, match=f"`{name}` should be a positive int, but got {value!r}"):
        complete(*loaded, "hello", **{name: value})


def test_sizes_of_chunks():
    assert chunk_sizes(1, 1024) == (16,)
    assert chunk_sizes(1000, 1024) == chunk_sizes(1024, 1024) == (1024,)
    assert chunk_sizes(2100, 1024) == (1024, 1024, 64)
    assert chunk_sizes(10, 7) == (7, 7)
    assert chunk_sizes(3, 1) == (1, 1, 1)
    assert chunk_sizes(400, 500) == (500,)  # not the 512 of its bucket


def test_chunk_of_a_budget():
    llama = ModelConfig.from_dict({
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    })  # fmt: skip
    expected = 2 * 2048 * (4 * 48 * 128 + 2 * (2 * 4096 + 3 * 14336) + 4 * 32 * 512)
    assert layer_bytes(llama, "bfloat16", 2, 2048) == expected
    assert chunk_tokens(llama, "bfloat16", 2, expected) == 2048
    assert chunk_tokens(llama, "bfloat16", 2, expected - 1) == 1024
    assert chunk_tokens(llama, "bfloat16", 1, 1 << 30) == 4096
    assert chunk_tokens(llama, "float32", 1, 1) == 16
