import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import directkv_jax
from directkv_jax.models import (
    Generation,
    Options,
    Piece,
    Sampling,
    complete,
    generate,
    request,
    stream,
)
from directkv_jax.models.decoding import _loop, _step
from directkv_jax.models.reading import _prefill_layer
from directkv_jax.models.sampling import row_keys, sample
from directkv_jax.models.sizes import bucket, capacity

PROMPTS = ["hello", "a much longer prompt", "1"]
WARM = Sampling(temperature=1.0, top_k=50, top_p=0.95)


def test_a_ragged_batch_equals_single_rows(loaded):
    batch = complete(*loaded, PROMPTS, max_new_tokens=12, max_length=64)
    assert batch.finish_reasons == ("length",) * 3
    for index, prompt in enumerate(PROMPTS):
        single = complete(*loaded, prompt, max_new_tokens=12, max_length=64)
        assert single.tokens[0] == batch.tokens[index]
        assert generate(*loaded, prompt, max_new_tokens=12, max_length=64) == batch.texts[index]
    assert generate(*loaded, PROMPTS, max_new_tokens=12, max_length=64) == list(batch.texts)


def test_tokens_are_those_of_the_numpy_model(tiny, loaded):
    model, tokenizer = loaded
    ids = tokenizer.encode("hello")
    tokens = complete(model, tokenizer, "hello", max_new_tokens=6, stop_tokens=()).tokens[0]
    for token in tokens:
        assert token == tiny.numpy_logits(tiny.config, tiny.weights, ids)[-1].argmax()
        ids.append(token)


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
def test_stream_and_while_loop_equal_generate(sampling, loaded):
    options = {"max_new_tokens": 20, "sampling": sampling, "seed": 5}
    whole = complete(*loaded, PROMPTS, **options)
    *pieces, last = stream(*loaded, PROMPTS, **options)
    assert all(isinstance(piece, Piece) for piece in pieces)
    for row, text in enumerate(whole.texts):
        assert "".join(piece.text for piece in pieces if piece.row == row) == text
    looped = complete(*loaded, PROMPTS, while_loop=True, **options)
    for other in (last, looped):
        assert isinstance(other, Generation)
        assert (other.texts, other.tokens) == (whole.texts, whole.tokens)
        assert other.finish_reasons == whole.finish_reasons


def test_seeds(loaded):
    def draw(prompts, seed):
        return complete(*loaded, prompts, max_new_tokens=10, sampling=WARM, seed=seed).tokens

    assert draw(["hello"], 1) == draw(["hello"], 1)
    assert draw(["hello"], 1) != draw(["hello"], 2)
    first, second = draw(["hello", "hello"], 1)
    assert first != second
    assert draw(["hello", "other"], 1)[0] == first  # whatever the neighbour is
    # With a seed for each row, wherever it is.
    (alone,) = draw(["hello"], [2**32 - 1])
    assert draw(["hello"], 2**32 - 1) == (alone,)
    assert draw(["other", "hello"], [3, 2**32 - 1])[1] == alone
    assert draw(["hello", "other"], [2**32 - 1, 3])[0] == alone
    assert draw(["other", "hello"], 2**32 - 1)[1] != alone


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_placements_and_implementations_agree(placement, implementation, loaded):
    options = {"max_new_tokens": 10, "max_length": 32, "page_size": 16}
    expected = complete(*loaded, PROMPTS[:2], **options)
    got = complete(
        *loaded, PROMPTS[:2], placement=placement, implementation=implementation, **options
    )
    assert got.tokens == expected.tokens
    used = loaded[0].create_cache(2, 32, page_size=16, placement=placement).nbytes
    kv_bytes = (used, 0) if placement == "host" else (0, used)
    assert (got.stats.kv_bytes_host, got.stats.kv_bytes_device) == kv_bytes


def test_stop_tokens_end_a_row_and_are_not_returned(loaded):
    free = complete(*loaded, PROMPTS, max_new_tokens=12, stop_tokens=())
    stop = free.tokens[0][4]
    for while_loop in (False, True):
        got = complete(
            *loaded, PROMPTS, max_new_tokens=12, stop_tokens=[stop], while_loop=while_loop
        )
        for row, tokens in enumerate(free.tokens):
            end = tokens.index(stop) if stop in tokens else None
            assert got.tokens[row] == tokens[:end]
            assert got.finish_reasons[row] == ("length" if end is None else "stop")


@pytest.mark.parametrize("while_loop", [False, True])
def test_a_full_cache_stops_the_row_alone(while_loop, loaded):
    prompts = [list(range(12)), list(range(3))]
    options = {"max_new_tokens": 9, "stop_tokens": (), "page_size": 16}
    free = complete(*loaded, prompts, **options)
    got = complete(*loaded, prompts, max_length=16, while_loop=while_loop, **options)
    # 12 + 4 tokens fill the cache; the fifth is chosen from what is there, but cannot be stored.
    assert got.tokens == (free.tokens[0][:5], free.tokens[1])
    assert got.finish_reasons == ("overflow", "length")


def test_steps_do_not_compile_again(loaded):
    options = {"max_length": 64, "stop_tokens": (3,)}
    complete(*loaded, ["hello"], max_new_tokens=4, **options)
    complete(*loaded, ["hello"], max_new_tokens=4, while_loop=True, **options)
    before = [f._cache_size() for f in (_prefill_layer, _step, _loop)]
    complete(*loaded, ["longer, same bucket"[:15]], max_new_tokens=40, **options | {"seed": 9})
    complete(*loaded, ["other"], max_new_tokens=9, while_loop=True, **options)
    assert [f._cache_size() for f in (_prefill_layer, _step, _loop)] == before


def test_the_cache_is_freed_however_it_ends(loaded, monkeypatch):
    freed, delete = [], directkv_jax.KVCache.delete
    monkeypatch.setattr(
        directkv_jax.KVCache, "delete", lambda cache: (freed.append(1), delete(cache))
    )
    complete(*loaded, "hello", max_new_tokens=3)
    assert freed == [1]
    pieces = stream(*loaded, "hello", max_new_tokens=30, stop_tokens=())
    next(pieces)
    pieces.close()
    assert freed == [1, 1]
    with pytest.raises(NotImplementedError, match='implementation="cuda" cannot do this'):
        complete(*loaded, "hello", implementation="cuda")
    assert freed == [1, 1, 1]


def test_progress_and_stats(loaded):
    seen = []
    got = complete(*loaded, PROMPTS, max_new_tokens=5, on_progress=lambda *at: seen.append(at))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert got.stats.new_tokens == sum(map(len, got.tokens))
    assert got.stats.prompt_tokens == sum(len(loaded[1].encode(p)) for p in PROMPTS)
    assert got.stats.decode_steps == 4
    assert got.logprobs is None
    assert got.stats.ttft_s > 0
    assert got.stats.tokens_per_s > 0
    one = complete(*loaded, "hello", max_new_tokens=1)
    assert (len(one.tokens[0]), one.stats.tokens_per_s) == (1, 0.0)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1] * 70], {"max_length": 64}, "prompt 0 has 70 tokens, but the cache holds 64"),
        (["hello", ""], {}, "prompt 1 has no tokens"),
        ([[1, 272]], {}, r"token ids in \[0, 272\), but got 1 .. 272"),
        ("hello", {"max_new_tokens": 0}, "`max_new_tokens` should be a positive int, but got 0"),
        ("hello", {"max_length": -1}, "`max_length` should be a positive int, but got -1"),
        ("hello", {"seed": -1}, r"`seed` should be an int in \[0, 2\*\*32\), .*, but got -1"),
        ("hello", {"placement": "disk"}, '`placement` should be "host" or "device"'),
        ("hello", {"page_size": 17}, "`page_size` should be a multiple of 16"),
        ("hello", {"page_size": 0, "max_length": 64}, "`page_size` should be a multiple of 16"),
        ("hello", {"max_new_tokens": 1 << 31}, "`max_new_tokens` should be at most 1073741824"),
        ("hello", {"max_length": 1 << 40}, "`max_length` should be at most 1073741824"),
        ("hello", {"stop_tokens": [1 << 31]}, "`stop_tokens` should be token ids, but got"),
        ("hello", {"stop_tokens": [-1]}, "`stop_tokens` should be token ids, but got"),
        ("hello", {"speculate": 65}, r"`speculate` should be an int in \[0, 64\], but got 65"),
        ("a\udcff", {}, "should be Unicode, but character 1 is none"),
        ("hello", {"implementation": "magic"}, "`implementation` should be None or one of"),
    ],
)
def test_bad_values(prompts, options, message, loaded):
    with pytest.raises(ValueError, match=message):
        complete(*loaded, prompts, **options)


def test_an_answer_takes_no_more_room_than_the_cache(loaded):
    """However long it may be."""
    most = {"max_new_tokens": 1 << 30, "max_length": 16, "page_size": 16}
    got = complete(*loaded, "hello", **most, while_loop=True, stop_tokens=[])
    assert got.finish_reasons == ("overflow",)


@pytest.mark.parametrize(
    "prompts",
    [7, [], [1, 2], None, b"ab", ["a", [1]], ["a", b"b"], [b"ab"], [[1.5]], [["a"]], [[None]]],
    ids=repr,
)
def test_bad_prompts(prompts, loaded):
    with pytest.raises(TypeError, match=r"`prompts.* should be a (str|list of token ids)"):
        generate(*loaded, prompts)


@pytest.mark.parametrize(
    "options",
    [{"stop_tokens": wrong} for wrong in ([1.5], b"ab", "ab", 5, ["a"], {None})]
    + [{"implementation": ["cpu"]}],
    ids=repr,
)
def test_bad_kinds(options, loaded):
    with pytest.raises(TypeError, match=f"`{next(iter(options))}` should be"):
        complete(*loaded, "hello", **options)


def test_ids_of_numpy(loaded):
    ids = loaded[1].encode("hello")
    expected = complete(*loaded, [ids], max_new_tokens=2).tokens
    for kind in (np.int32, np.uint16, jnp.int32):
        prompt, stop = kind(ids) if kind is jnp.int32 else np.asarray(ids, kind), {1, np.int64(2)}
        sizes = {"max_new_tokens": np.int32(2), "max_length": np.int64(32), "seed": np.int64(3)}
        assert complete(*loaded, [prompt], stop_tokens=stop, **sizes).tokens == expected


def test_stream_checks_at_once(loaded):
    with pytest.raises(TypeError, match="unexpected keyword"):
        stream(*loaded, "hello", beams=3)
    with pytest.raises(ValueError, match="prompt 0 has 70 tokens"):
        stream(*loaded, [[1] * 70], max_length=64)
    with pytest.raises(TypeError, match="`sampling` should be a Sampling"):
        Options(sampling="greedy")


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_sampling_takes_numbers(name):
    for wrong in ("1", None, [1], 10**400, b"1"):
        with pytest.raises(TypeError, match=f"`{name}` should be a number"):
            Sampling(**{name: wrong})
    assert hash(Sampling(**{name: jnp.float32(1)})) == hash(Sampling(**{name: 1.0}))
    assert Sampling(top_k=np.int64(3)) == Sampling(top_k=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "`temperature` should be 0 or more"),
        ({"temperature": float("nan")}, "`temperature` should be 0 or more"),
        ({"top_k": 0}, "`top_k` should be a positive int or None"),
        ({"top_p": 0.0}, r"`top_p` should be in \(0, 1\]"),
        ({"min_p": 1.5}, r"`min_p` should be in \[0, 1\]"),
    ],
)
def test_bad_sampling(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


# Probabilities 0.5, 0.25, 0.125, 0.0625 twice.
LOGITS = jnp.log(jnp.array([0.0625, 0.25, 0.5, 0.0625, 0.125]))


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(), {2}),
        (Sampling(1.0, top_k=1), {2}),
        (Sampling(1.0), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_k=3), {1, 2, 4}),
        (Sampling(1.0, top_k=99), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_p=0.5), {2}),
        (Sampling(1.0, top_p=0.51), {1, 2}),
        # Of the two that top_k leaves, the first has 2/3, so that 0.6 is reached by it alone.
        (Sampling(1.0, top_k=2, top_p=0.6), {2}),
        # At temperature 1/4 the first has 0.94.
        (Sampling(0.25, top_p=0.9), {2}),
        # Temperatures that are 0 in float32.
        (Sampling(1e-40), {2}),
        (Sampling(5e-324, top_p=0.9, min_p=0.5), {2}),
        (Sampling(1e308), {0, 1, 2, 3, 4}),
        (Sampling(1.0, min_p=0.2), {1, 2, 4}),
        (Sampling(1.0, min_p=1.0), {2}),
        (Sampling(1.0, top_k=2, min_p=0.1), {1, 2}),
    ],
)
def test_filters(sampling, possible):
    draws = 512
    logits = jnp.broadcast_to(LOGITS, (draws, 5))
    draw = jax.jit(sample, static_argnames="sampling")
    got = draw(logits, row_keys(0, draws), jnp.zeros(draws, jnp.int32), sampling=sampling)
    assert set(np.asarray(got).tolist()) == possible


def test_frequencies_of_draws_and_new_ones_at_each_step():
    draws = 4096
    logits, keys = jnp.broadcast_to(LOGITS, (draws, 5)), row_keys(1, draws)
    first = sample(logits, keys, jnp.zeros(draws, jnp.int32), Sampling(1.0))
    second = sample(logits, keys, jnp.ones(draws, jnp.int32), Sampling(1.0))
    shares = np.bincount(first, minlength=5) / draws
    np.testing.assert_allclose(shares, np.exp(LOGITS), atol=0.03)
    assert 0.2 < np.mean(np.asarray(first) == np.asarray(second)) < 0.5  # sum of squares: 0.34


def test_buckets():
    assert [bucket(n) for n in (0, 1, 16, 17, 1000, 1024)] == [16, 16, 16, 32, 1024, 1024]
    assert [capacity(n) for n in (1, 100, 4096, 4097, 12289)] == [16, 128, 4096, 8192, 16384]


def test_texts_longer_than_the_model_was_made_for(loaded):
    model, tokenizer = loaded
    prepare = functools.partial(request.prepare, model, tokenizer, [[1] * 500])
    prepare(Options(max_new_tokens=13))
    with pytest.warns(UserWarning, match=r"grow to 513 tokens, more than the 512.*not scaled"):
        prepare(Options(max_new_tokens=14))
    prepare(Options(max_new_tokens=14, max_length=512))  # where the cache ends


def test_learned_positions_end(loaded):
    config = dataclasses.replace(loaded[0].config, learned_positions=34, position_offset=2)
    learned = types.SimpleNamespace(config=config, dtype=loaded[0].dtype)
    options = Options(max_new_tokens=3)
    request.prepare(learned, loaded[1], [[1] * 30], options)
    with pytest.raises(ValueError, match="grow to 33 tokens, but this model has positions for 32"):
        request.prepare(learned, loaded[1], [[1] * 31], options)


def test_bytes_read_from_host_memory(loaded):
    """By hand: two rows of 3 and 9 tokens, five steps each."""
    done = complete(*loaded, [[1] * 3, [2] * 9], max_new_tokens=6, stop_tokens=())
    per_token = 2 * 2 * 2 * 16 * 4  # K and V, L, K, H, float32
    expected = per_token * (sum(range(3, 8)) + sum(range(9, 14)))
    decode_s = 10 / done.stats.tokens_per_s
    assert done.stats.host_bytes_per_s * decode_s == pytest.approx(expected)
    done = complete(*loaded, [[1] * 3], max_new_tokens=6, stop_tokens=(), placement="device")
    assert done.stats.host_bytes_per_s == 0
