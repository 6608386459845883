"""Stop strings: in a text in pieces, and in answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directkv_jax.models import Options, complete, stream
from directkv_jax.models.decoding import Decoder, _stop
from directkv_jax.models.stopping import StopStrings

PROMPTS = ["hello", "a much longer prompt", "1"]
LETTERS = st.text("ab", max_size=12)
# The shapes of the neighbouring files, so that the programs are the same.
OPTIONS = {"max_new_tokens": 24, "stop_tokens": (), "max_length": 64, "page_size": 16}


def cut(text, strings):
    """The text before the stop string that is complete first, letter by letter; else None."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in strings if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return None


@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_cut_does_not_depend_on_the_pieces(pieces, strings):
    matcher, shown, text = StopStrings(strings), "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        text += piece
        expected = cut(text, strings)
        assert matcher.found == (expected is not None)
        if matcher.found:
            assert shown == expected
            return
        # All is shown but what the next piece may turn into a stop string, and no less.
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(s.startswith(held) for s in strings)
        ends = (text[i:] for i in range(len(shown)))
        assert not any(s.startswith(end) for s in strings for end in ends)
    assert shown + matcher.flush() == text


@pytest.fixture(scope="module")
def free(loaded):
    """Answers that nothing stops."""
    return complete(*loaded, PROMPTS, **OPTIONS)


@pytest.mark.parametrize(("while_loop", "speculate"), [(False, 0), (True, 0), (False, 3)])
def test_a_row_ends_before_its_stop_string_and_leaves_the_others(
    while_loop, speculate, loaded, free
):
    row, text = max(enumerate(free.texts), key=lambda pair: len(pair[1]))
    string = text[5:8]  # of several tokens
    got = complete(
        *loaded, PROMPTS, stop_strings=["no such", string], while_loop=while_loop,
        speculate=speculate, **OPTIONS,
    )  # fmt: skip
    assert string in text
    for index, whole in enumerate(free.texts):
        expected = cut(whole, [string])
        if expected is None:
            assert got.texts[index] == whole
            assert got.tokens[index] == free.tokens[index]
        else:
            assert got.texts[index] == expected
            tokens = got.tokens[index]
            assert tokens == free.tokens[index][: len(tokens)]
            assert string not in loaded[1].decode(tokens[:-1])  # no token too many
        assert got.finish_reasons[index] == ("length" if expected is None else "stop")
    assert got.finish_reasons[row] == "stop"


def test_what_may_become_a_stop_string_is_not_streamed(loaded, free):
    text = free.texts[1]
    string = text[9:12]
    *pieces, last = stream(*loaded, PROMPTS, stop_strings=[string], **OPTIONS)
    assert last.texts[1] == cut(text, [string])
    shown = ""
    for piece in (piece for piece in pieces if piece.row == 1):
        shown += piece.text
        assert not shown.endswith((string[0], string[:2])) or shown == last.texts[1]
    assert shown == last.texts[1]


@pytest.mark.parametrize("while_loop", [False, True])
def test_decoding_ends_when_all_rows_have_stopped(while_loop, loaded, free):
    strings = [text[2:4] for text in free.texts]
    got = complete(*loaded, PROMPTS, stop_strings=strings, while_loop=while_loop, **OPTIONS)
    assert got.finish_reasons == ("stop",) * 3
    assert got.stats.decode_steps < 16
    assert got.texts == tuple(cut(text, strings) for text in free.texts)


def test_stopped_rows_stop_on_the_device(loaded, free, monkeypatch):
    told = []
    stop = Decoder.stop
    monkeypatch.setattr(
        Decoder, "stop", lambda *call: (told.append(call[2].tolist()), stop(*call))[1]
    )
    complete(*loaded, PROMPTS, stop_strings=[free.texts[0][:2]], **OPTIONS)
    stopped = [cut(text, [free.texts[0][:2]]) is not None for text in free.texts]
    assert told[-1] == stopped
    assert len(told) == len(set(map(str, told)))  # each time for a new row


def test_nothing_is_compiled_once_text_comes(loaded, free, compilations):
    _stop.clear_cache()
    pieces = stream(*loaded, PROMPTS, stop_strings=[free.texts[0][3:5]], **OPTIONS)
    next(pieces)
    before = compilations()
    *_, last = pieces
    assert "stop" in last.finish_reasons
    assert compilations() == before


def test_an_unfinished_stop_string_is_shown_at_the_end(loaded, free):
    string = free.texts[0][-2:] + "\n no such end"
    got = complete(*loaded, PROMPTS, stop_strings=[string], **OPTIONS)
    assert got.texts == free.texts
    assert got.finish_reasons == ("length",) * 3


def test_bad_stop_strings():
    with pytest.raises(ValueError, match="`stop_strings` should hold no empty string"):
        Options(stop_strings=["a", ""])
    with pytest.raises(TypeError, match="`stop_strings` should be a sequence of str, but got 'ab'"):
        Options(stop_strings="ab")
    with pytest.raises(TypeError, match="`stop_strings` should hold str alone"):
        Options(stop_strings=[1])
