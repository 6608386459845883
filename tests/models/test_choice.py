"""Over a whole answer: the repetition penalty, log-probabilities, and what they are kept by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from directkv_jax.models import Options, Sampling, complete
from directkv_jax.models.request import prepare
from directkv_jax.models.sampling import row_keys, sample
from directkv_jax.models.state import initial_state

PROMPTS = ["hello", "a much longer prompt", "1"]
COUNT = 10
OPTIONS = {"max_new_tokens": COUNT, "stop_tokens": (), "max_length": 64, "page_size": 16}
PENALTY = Sampling(repetition_penalty=0.5)  # rewards repetition, so that it changes many tokens


def penalized(logits, seen, penalty):
    """As Hugging Face's RepetitionPenaltyLogitsProcessor."""
    changed = logits.copy()
    for token in set(seen):
        changed[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    return changed


def assert_logprobs(got, logits, ids):
    """Of the tokens at the end of `ids`, by the logits of the model over all of them."""
    expected = jax.nn.log_softmax(logits, axis=-1)[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(got, expected[-len(got) :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", [{}, {"while_loop": True}, {"speculate": 3}], ids=str)
def test_penalty_and_logprobs_are_those_of_the_numpy_model(way, tiny, loaded):
    got = complete(*loaded, PROMPTS, sampling=PENALTY, logprobs=True, **OPTIONS, **way)
    changed = 0
    for prompt, tokens, logprobs in zip(PROMPTS, got.tokens, got.logprobs, strict=True):
        ids = loaded[1].encode(prompt) + list(tokens)
        logits = tiny.numpy_logits(tiny.config, tiny.weights, ids)
        for end in range(len(ids) - COUNT, len(ids)):
            assert ids[end] == penalized(logits[end - 1], ids[:end], 0.5).argmax()
            changed += ids[end] != logits[end - 1].argmax()
        assert len(logprobs) == len(tokens) == COUNT
        assert_logprobs(logprobs, logits, ids)  # before the penalty
    assert changed > 3


@pytest.mark.parametrize(("penalty", "expected"), [(2.0, [1, 1, 0]), (0.5, [0, 0, 1])])
def test_a_penalty_turns_with_the_sign_of_the_logit(penalty, expected):
    logits = jnp.array([[3.0, 2.0], [-1.0, -1.5], [3.0, 2.0]])
    seen = jnp.array([[True, False], [True, False], [False, True]])
    step = jnp.zeros(3, jnp.int32)
    got = sample(logits, row_keys(0, 3), step, Sampling(repetition_penalty=penalty), seen)
    assert got.tolist() == expected


def test_without_a_penalty_or_drafts_nothing_is_kept(loaded):
    def state(**options):
        return initial_state(prepare(*loaded, PROMPTS, Options(**options)), 272, 32)

    plain = len(jax.tree.leaves(state()))
    assert (state().seen, state().history) == (None, None)
    assert len(jax.tree.leaves(state(sampling=Sampling(repetition_penalty=1.1)))) == plain + 1
    assert len(jax.tree.leaves(state(speculate=2))) == plain + 2
    seen = state(sampling=Sampling(repetition_penalty=1.1)).seen
    ids = loaded[1].encode(PROMPTS[2])
    assert np.flatnonzero(seen[2]).tolist() == sorted(set(ids))  # of the row, without its padding


def test_logprobs_end_with_the_tokens(loaded):
    options = {**OPTIONS, "sampling": PENALTY, "logprobs": True}
    free = complete(*loaded, PROMPTS, **options)
    got = complete(*loaded, PROMPTS, **options | {"stop_tokens": [free.tokens[0][4]]})
    assert len(got.tokens[0]) < COUNT
    for row, logprobs in enumerate(got.logprobs):
        assert len(logprobs) == len(got.tokens[row])
        np.testing.assert_allclose(logprobs, free.logprobs[row][: len(logprobs)], atol=1e-5)


def test_bad_choices(loaded):
    with pytest.raises(ValueError, match="have one for each of the 3 prompts, but has 2"):
        complete(*loaded, PROMPTS, seed=[1, 2])
    for seed in ([1, -1], [1.5], "12", None):
        with pytest.raises(ValueError, match="`seed` should be an int"):
            Options(seed=seed)
    for penalty in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="`repetition_penalty` should be a positive number"):
            Sampling(repetition_penalty=penalty)
