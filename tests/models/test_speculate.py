"""Prompt-lookup decoding gives the tokens of greedy decoding, with fewer calls of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from directkv_jax.models import Options, Sampling, complete
from directkv_jax.models.decoding import _loop, _step
from directkv_jax.models.lookup import History

DRAFTS = 3
OPTIONS = {"stop_tokens": (), "max_length": 64, "page_size": 16}
REPEATING = [[5, 6, 7, 8] * 5, [9, 9, 9], [1, 2, 3, 40, 1, 2]]


draft = jax.jit(lambda history: history.draft(DRAFTS))
append = jax.jit(History.append)


def looked_up(tokens, width):
    """The draft in plain Python; None without an occurrence."""
    for n in (3, 2, 1):
        for start in range(len(tokens) - 1, n - 1, -1):
            if tokens[start - n : start] == tokens[len(tokens) - n :]:
                copy = list(tokens)
                for i in range(width):
                    copy.append(copy[start + i])
                return copy[len(tokens) :]
    return None


@settings(deadline=None)  # the first one compiles
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=3, max_size=3))
def test_drafts(rows):
    tokens = np.random.default_rng(0).integers(0, 4, (3, 14)).astype(np.int32)  # what is beyond
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    lengths = jnp.array([len(ids) for ids in rows], jnp.int32)
    history = History(jnp.asarray(tokens), lengths)
    drafts, found = draft(history)
    longer, found_longer = draft(append(history, np.array([1, 2, 3]), np.array([1, 0, 1], bool)))
    for row, ids in enumerate(rows):
        more = [*ids, row + 1] if row != 1 else ids
        for known, got, some in (
            (ids, drafts[row], found[row]),
            (more, longer[row], found_longer[row]),
        ):
            expected = looked_up(known, DRAFTS)
            assert bool(some) == (expected is not None)
            assert expected is None or got.tolist() == expected


blocks = st.lists(st.integers(0, 271), min_size=1, max_size=5)
prompts = st.tuples(blocks, st.integers(1, 6)).map(lambda drawn: drawn[0] * drawn[1])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(prompts, min_size=3, max_size=3),
    new=st.integers(1, 50),
    stop=st.lists(st.integers(0, 271), max_size=8),
)
def test_greedy_tokens(rows, new, stop, loaded):
    options = {**OPTIONS, "max_new_tokens": new, "stop_tokens": stop}
    expected = complete(*loaded, rows, **options)
    for while_loop in (False, True)[: 1 + (new <= 16)]:
        got = complete(*loaded, rows, speculate=DRAFTS, while_loop=while_loop, **options)
        assert got.tokens == expected.tokens
        assert got.finish_reasons == expected.finish_reasons  # "stop", "length" and "overflow"
        assert got.texts == expected.texts
        assert 0 <= got.stats.accepted <= got.stats.drafted
        assert got.stats.decode_steps <= expected.stats.decode_steps


def test_full_caches(loaded):
    options = {**OPTIONS, "max_new_tokens": 60}
    rows = [[7] * 32, [7] * 31, [7] * 20]
    expected = complete(*loaded, rows, **options)
    got = complete(*loaded, rows, speculate=DRAFTS, **options)
    assert expected.finish_reasons == got.finish_reasons == ("overflow",) * 3
    assert got.tokens == expected.tokens
    assert [len(tokens) for tokens in got.tokens] == [33, 34, 45]


def test_accepted_drafts_save_calls_of_the_model(loaded):
    options = {**OPTIONS, "max_new_tokens": 40}
    expected = complete(*loaded, REPEATING, **options)
    got = complete(*loaded, REPEATING, speculate=DRAFTS, **options)
    assert got.tokens == expected.tokens
    assert expected.stats.decode_steps == 39
    assert (expected.stats.drafted, expected.stats.acceptance_rate) == (0, 0.0)
    assert got.stats.accepted > 0
    assert got.stats.acceptance_rate == got.stats.accepted / got.stats.drafted
    # In each step one token of each running row is not a draft.
    assert 39 / (1 + DRAFTS) <= got.stats.decode_steps < 39
    assert got.stats.new_tokens - got.stats.accepted - 3 <= 3 * got.stats.decode_steps


def test_steps_with_drafts_do_not_compile_again(loaded):
    options = {**OPTIONS, "speculate": DRAFTS}
    for while_loop in (False, True):
        complete(*loaded, REPEATING, max_new_tokens=4, while_loop=while_loop, **options)
    before = _step._cache_size(), _loop._cache_size()
    for while_loop in (False, True):
        complete(*loaded, [[5, 6] * 7] * 3, max_new_tokens=12, while_loop=while_loop, **options)
    assert (_step._cache_size(), _loop._cache_size()) == before


def test_bad_speculation():
    with pytest.raises(ValueError, match=r"`speculate` needs greedy sampling, .* temperature 0.7"):
        Options(speculate=2, sampling=Sampling(0.7))
    for value in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"`speculate` should be an int in \[0, 64\]"):
            Options(speculate=value)
