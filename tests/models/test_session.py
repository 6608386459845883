"""Sessions and chats: what is in the cache is not read again, and answers are those without one."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import windowed
from damaged import described, rewritten
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from directkv_jax import models
from directkv_jax.models.decoding import Decoder

TEXTS = ("ab", "abc", "abcab cab", "abcab cabbage, and so on and so on", "cab", "abcab cab!")


_fresh: dict[tuple, tuple[int, ...]] = {}


def fresh(model_and_tokenizer, ids, count):
    """The tokens of an answer without a session."""
    if (key := (tuple(ids), count)) not in _fresh:
        done = models.complete(
            *model_and_tokenizer, [ids], max_new_tokens=count, max_length=96, page_size=16
        )
        _fresh[key] = done.tokens[0]
    return _fresh[key]


@pytest.fixture
def session(loaded):
    with models.Session(*loaded, max_length=96, page_size=16, rollback=32) as session:
        yield session


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(TEXTS), st.sampled_from([1, 5])), max_size=5))
def test_answers_are_those_of_a_fresh_cache(loaded, session, turns):
    tokenizer = loaded[1]
    for text, count in turns:
        ids = tuple(tokenizer.encode(text))
        before = session.tokens
        done = session.complete(ids, max_new_tokens=count)
        assert done.tokens[0] == fresh(loaded, ids, count)
        same = next(
            (i for i, (a, b) in enumerate(zip(before, ids[:-1], strict=False)) if a != b),
            min(len(before), len(ids) - 1),
        )
        assert done.stats.cached_tokens == same
        assert session.tokens[: len(ids)] == ids
        assert session.cache.lengths.tolist() == [len(session.tokens)]


def test_a_conversation_reads_what_is_new(loaded, session):
    ids = list(loaded[1].encode("abcab cab"))
    first = session.complete(ids, max_new_tokens=4)
    # All but the last token of the answer is cached, then comes what is new.
    again = [*ids, *first.tokens[0], *loaded[1].encode(" and?", add_special_tokens=False)]
    done = session.complete(again, max_new_tokens=3)
    assert done.stats.cached_tokens == len(ids) + 3
    assert done.tokens[0] == fresh(loaded, tuple(again), 3)
    assert done.stats.prompt_tokens == len(again)


def test_a_stream_that_is_closed_early_keeps_what_it_has(loaded, session):
    ids = loaded[1].encode("abcab cab")
    stream = session.stream(ids, max_new_tokens=8)
    next(piece for piece in stream)
    stream.close()
    assert session.tokens[: len(ids)] == tuple(ids)
    assert session.complete(ids, max_new_tokens=5).tokens[0] == fresh(loaded, tuple(ids), 5)


@pytest.mark.parametrize("method", ["prefill", "step"])
def test_what_an_interrupt_lost_is_read_again(loaded, session, monkeypatch, tmp_path, method):
    """Ctrl-C after a call has taken the cache, and before its result has a name."""
    ids = tuple(loaded[1].encode("abcab cab"))
    session.complete(ids, max_new_tokens=2)
    call = getattr(Decoder, method)

    def interrupted(*args, **kwargs):
        call(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.complete((*ids, 5), max_new_tokens=8)
    assert session.cache.is_deleted()
    session.save(tmp_path / "session")
    assert session.complete(ids, max_new_tokens=5).tokens[0] == fresh(loaded, ids, 5)
    with models.Session.load(tmp_path / "session", *loaded) as again:
        assert again.tokens == ()
        assert again.complete(ids, max_new_tokens=5).tokens[0] == fresh(loaded, ids, 5)


def test_a_stream_that_is_open_has_the_cache(loaded, session, tmp_path):
    ids = tuple(loaded[1].encode("abcab cab"))
    session.complete(ids, max_new_tokens=2)
    session.save(tmp_path / "session")
    early, stream = session.stream(ids, max_new_tokens=8), session.stream(ids, max_new_tokens=8)
    with pytest.raises(ValueError, match="overtaken"):
        next(early)
    next(stream)
    for call in (lambda: session.save(tmp_path / "session"), lambda: session.stream(ids)):
        with pytest.raises(ValueError, match="A stream of this session is open"):
            call()
    stream.close()
    with models.Session.load(tmp_path / "session", *loaded) as again:
        assert again.tokens[: len(ids)] == ids
    assert session.complete(ids, max_new_tokens=5).tokens[0] == fresh(loaded, ids, 5)


@pytest.mark.parametrize("change", ["rope", "weights"])
def test_a_cache_of_another_model_is_refused(loaded, session, tmp_path, change):
    """One that differs in nothing that the shapes of its cache show."""
    session.complete("abcab", max_new_tokens=2)
    session.save(tmp_path / "session")
    other, tokenizer = loaded
    if change == "rope":
        layers = tuple(
            dataclasses.replace(layer, rope=dataclasses.replace(layer.rope, theta=5e4))
            for layer in other.config.layers
        )
        other = models.Transformer(
            dataclasses.replace(other.config, layers=layers), rngs=nnx.Rngs(0)
        )
        nnx.update(other, nnx.state(loaded[0]))
    else:
        other = nnx.clone(other)
        kernel = other.layers[1].mlp.down_proj.kernel
        kernel[...] = kernel[...] * 2
    with pytest.raises(ValueError, match="of another model"):
        models.Session.load(tmp_path / "session", other, tokenizer)


def test_stop_strings_leave_nothing_behind(loaded, session):
    ids = tuple(loaded[1].encode("abcab cab"))
    answer = session.complete(ids, max_new_tokens=8).texts[0]
    session.complete(ids, max_new_tokens=8, stop_strings=[answer[1]])
    longer = (*ids, *loaded[1].encode("!", add_special_tokens=False))
    assert session.complete(longer, max_new_tokens=5).tokens[0] == fresh(loaded, longer, 5)


def test_penalties_and_drafts_see_the_whole_prompt(loaded, session):
    ids = tuple(loaded[1].encode("abcab cab abcab cab"))
    session.complete(ids, max_new_tokens=1)
    with jax.default_matmul_precision("highest"):
        for options in (
            {"sampling": models.Sampling(repetition_penalty=1.5)},
            {"speculate": 3},
        ):
            expected = models.complete(*loaded, [ids], max_new_tokens=6, max_length=96, **options)
            done = session.complete(ids, max_new_tokens=6, **options)
            assert done.stats.cached_tokens > 0
            assert done.tokens == expected.tokens


def test_a_row_that_overflowed_starts_anew(loaded, session):
    ids = tuple(loaded[1].encode("ab"))
    done = session.complete(ids, max_new_tokens=200, stop_tokens=())
    assert done.finish_reasons == ("overflow",)
    assert session.complete(ids, max_new_tokens=5).tokens[0] == fresh(loaded, ids, 5)


@pytest.mark.parametrize(("max_length", "placement"), [(None, None), (200, "device")])
def test_a_saved_session_goes_on(loaded, session, tmp_path, max_length, placement):
    ids = tuple(loaded[1].encode("abcab cab"))
    session.complete(ids, max_new_tokens=4)
    session.save(tmp_path / "session", {"format": "mine"})
    other = models.Session.load(
        tmp_path / "session", *loaded, max_length=max_length, placement=placement
    )
    with other:
        assert other.tokens == session.tokens
        assert other.metadata == {"format": "mine"}
        assert (other.cache.host_bytes > 0) == (placement is None)
        longer = (*session.tokens, *loaded[1].encode("cab", add_special_tokens=False))
        done = other.complete(longer, max_new_tokens=5)
        assert done.stats.cached_tokens == len(session.tokens)
        assert done.tokens[0] == fresh(loaded, longer, 5)


def test_a_session_of_another_model_is_refused(loaded, session, tmp_path):
    session.complete("ab", max_new_tokens=1)
    session.save(tmp_path / "session")
    model, tokenizer = loaded
    kernel = model.layers[0].attention.qkv_proj.kernel
    value = kernel[...]
    try:
        kernel[...] = value + 1
        with pytest.raises(ValueError, match="of another model"):
            models.Session.load(tmp_path / "session", model, tokenizer)
    finally:
        kernel[...] = value


def test_what_ends_a_text_does_not_change_its_cache(loaded, session, tmp_path):
    session.complete("ab", max_new_tokens=1)
    session.save(tmp_path / "session")
    graphdef, state = nnx.split(loaded[0])
    other = nnx.merge(graphdef, state)
    other.config = dataclasses.replace(other.config, eos_token_id=(5,))
    with models.Session.load(tmp_path / "session", other, loaded[1]) as again:
        assert again.tokens == session.tokens


def test_metadata_that_are_no_texts_are_refused_before_a_file_is_written(session, tmp_path):
    for metadata in ({"a": 5}, {5: "a"}, {"a": "\udcff"}, ["a"], "ab"):
        with pytest.raises(TypeError, match="metadata should be"):
            session.save(tmp_path / "session", metadata)
    assert not any(tmp_path.iterdir())


def test_damaged_sessions_name_the_file(loaded, session, tmp_path):
    path = tmp_path / "session"
    session.complete("abcab", max_new_tokens=1)
    session.save(path, {"messages": "[]"})
    whole = path.read_bytes()

    def messages(text):
        return lambda header: header["__metadata__"].update({"given.messages": text})

    def retyped(header):
        header["tokens"]["dtype"] = "F32"

    def refused(damaged, load):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            load(path, *loaded)

    for change in (
        described("part0", "head_dim", 72),
        described("part0", "num_kv_heads", None),
        retyped,
    ):
        refused(rewritten(whole, change), models.Session.load)
    tokens = np.int32(session.tokens).tobytes()
    refused(whole.replace(tokens, np.int32([1 << 20] * len(session.tokens)).tobytes()),
            models.Session.load)  # fmt: skip
    # A row that lacks the last of its tokens.
    length = np.int32([len(session.tokens)]).tobytes()
    at = whole.rindex(length)
    refused(whole[:at] + np.int32([1]).tobytes() + whole[at + 4 :], models.Session.load)
    for text in ("", "{}", "[1]", '[{"role": 1}]', '[{"role": "user", "content": 5}]', "[" * 9999):
        refused(rewritten(whole, messages(text)), models.Chat.load)
    path.write_bytes(whole)
    models.Chat.load(path, *loaded).session.close()


def test_bad_calls_are_refused_before_anything_is_lost(loaded, session):
    session.complete("abcab", max_new_tokens=1)
    tokens = session.tokens
    with pytest.raises(ValueError, match="`max_length` is an option of the Session"):
        session.stream("ab", max_length=5)
    with pytest.raises(ValueError, match="holds 96 for each row"):
        session.stream([1] * 97)
    with pytest.raises(ValueError, match="at most the `rollback`"):
        session.stream("ab", speculate=33)
    for prompt in (b"ab", {1: 2}, {1}, 5, [1.5], None):
        with pytest.raises(TypeError, match="`prompt` should be a list of token ids"):
            session.stream(prompt)
    assert session.tokens == tokens
    begun = session.stream("ab")
    session.close()
    with pytest.raises(ValueError, match="closed"):
        next(begun)
    with pytest.raises(ValueError, match="closed"):
        session.stream("ab")


def test_sizes_and_ids_of_numpy_and_jax(loaded):
    sizes = {"max_length": np.int64(32), "page_size": np.int64(16), "rollback": np.int8(3)}
    with models.Session(*loaded, **sizes) as session:
        for prompt in (np.array([1, 2, 3]), jnp.array([1, 2, 3]), (1, 2, 3)):
            assert session.complete(prompt, max_new_tokens=1).stats.new_tokens == 1


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": "a"}, {"max_length": 0}, {"max_length": None}, {"page_size": 17},
        {"placement": "disk"}, {"rollback": -1}, {"rollback": "a"},
    ],
    ids=repr,
)  # fmt: skip
def test_bad_sizes_of_a_session(loaded, options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` should be"):
        models.Session(*loaded, **{"max_length": 32, **options})


class Template:
    """A tokenizer whose chats are plain lines."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_chat(self, messages):
        """Tokens of one line for each message, and the begin of the next."""
        text = "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages)
        return self.encode(text + "a:")


def test_a_chat_remembers(loaded):
    model, tokenizer = loaded[0], Template(loaded[1])
    with models.Session(model, tokenizer, max_length=160, page_size=16) as session:
        chat = models.Chat(session, system="be brief")
        *_, first = chat.stream("hello", max_new_tokens=6, stop_tokens=())
        assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
        assert chat.messages[-1]["content"] == first.texts[0]
        *_, second = chat.stream("again", max_new_tokens=4, stop_tokens=())
        assert second.stats.cached_tokens >= len(tokenizer.encode_chat(chat.messages[:2])) - 1
        alone = models.chat(
            model, tokenizer, chat.messages[:-1], max_new_tokens=4, stop_tokens=(), max_length=160
        )
        assert second.texts[0] == alone
        half = chat.stream("more", max_new_tokens=6, stop_tokens=())
        shown = next(item.text for item in half if isinstance(item, models.Piece))
        half.close()
        assert chat.messages[-1] == {"role": "assistant", "content": shown}
        with pytest.raises(ValueError, match="holds 160"):
            chat.stream("x" * 500)
        assert chat.messages[-2] == {"role": "user", "content": "more"}


class Numbers:
    """Every token is a character."""

    eos_ids: tuple[int, ...] = ()

    def decode(self, ids, **_):
        """A letter for each."""
        return "".join(chr(65 + token % 26) for token in ids)

    def stream_decoder(self):
        """As of a real tokenizer."""
        from directkv_jax.models.tokenizer import StreamDecoder

        return StreamDecoder(self)


@pytest.mark.parametrize("page_size", [16, 160])  # rings, or as long as a row
def test_windows_are_saved(tmp_path, page_size):
    model = models.Transformer(windowed.CONFIG, rngs=nnx.Rngs(0))
    ids = np.random.default_rng(1).integers(0, 80, 70).tolist()
    options = {"max_new_tokens": 4, "prefill_chunk": 16}
    with models.Session(model, Numbers(), max_length=160, page_size=page_size) as session:
        session.complete(ids, **options)
        session.save(tmp_path / "session")
        longer = [*session.tokens, 7, 8]
        with models.Session.load(tmp_path / "session", model, Numbers()) as other:
            assert other.tokens == session.tokens
            done = other.complete(longer, **options)
            assert done.stats.cached_tokens == len(session.tokens)
            assert done.tokens == session.complete(longer, **options).tokens


def test_windows_take_back_as_far_as_they_can():
    """Further back than `rollback` all is read anew, and the answer is the same."""
    model = models.Transformer(windowed.CONFIG, rngs=nnx.Rngs(0))

    def open_session():
        return models.Session(model, Numbers(), max_length=160, page_size=16, rollback=8)

    ids = np.random.default_rng(0).integers(0, 80, 70).tolist()
    near, far = [*ids[:68], 3], [*ids[:40], 3]
    with open_session() as session:
        session.complete(ids, max_new_tokens=4, prefill_chunk=16)
        for prompt, cached in ((near, 68), (far, 0)):
            done = session.complete(prompt, max_new_tokens=4, prefill_chunk=16)
            assert done.stats.cached_tokens == cached
            with open_session() as other:
                expected = other.complete(prompt, max_new_tokens=4, prefill_chunk=16)
            assert done.tokens == expected.tokens
