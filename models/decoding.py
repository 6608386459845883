"""The compiled pieces of generation: the prompts, a decode step, a loop of steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax.models.cache import ModelCache
from directkv_jax.models.graph import split
from directkv_jax.models.reading import PromptReader
from directkv_jax.models.sampling import Sampling
from directkv_jax.models.state import NOTHING, Chosen, DecodeState, choose
from directkv_jax.models.transformer import Transformer


def decode_step(
    model: Transformer, cache: ModelCache, state: DecodeState, *, sampling: Sampling,
    implementation=None, logprobs: bool = False, speculate: int = 0,
) -> tuple[ModelCache, DecodeState, Chosen]:  # fmt: skip
    """Puts the last token of each running row into the cache and chooses the next.

    With `speculate` up to that many drafts follow the last token in the same call of the model.
    Those that equal what it chooses stay in the cache, the others are rolled back; W, the most
    tokens that are chosen, is 1 + `speculate`.

    Returns:
      (cache, state, the tokens chosen). A stop token is returned like any other. A row whose token
      no longer fits into the cache stops.
    """
    before, count = cache.lengths, state.count
    tokens, valid = state.tokens[:, None], (~state.done).astype(jnp.int32)
    drafts = drafted = None
    if speculate:
        drafts, drafted = _drafts(cache, state, speculate)
        tokens = jnp.concatenate([tokens, jnp.maximum(drafts, 0)], axis=1)
        valid += drafted
    logits, cache = model(tokens, cache, valid, implementation=implementation)
    state = dataclasses.replace(state, done=state.done | cache.overflowed)
    state, chosen = choose(logits, drafts, state, sampling=sampling, logprobs=logprobs)
    if speculate:
        cache = cache.truncate(before + state.count - count)
        chosen = dataclasses.replace(chosen, drafted=drafted)
    return cache, state, chosen


def _drafts(cache: ModelCache, state: DecodeState, width: int) -> tuple[jax.Array, jax.Array]:
    """(int32[B, width] padded with `NOTHING`, int32[B]: how many are drafts).

    So few that all of them fit into the cache and into `limit`: a row then ends as it does without.
    """
    assert state.history is not None
    drafts, found = state.history.draft(width)
    room = jnp.minimum(cache.max_length - cache.lengths, state.limit - state.count) - 1
    number = jnp.where(found & ~state.done, jnp.clip(room, 0, width), 0)
    return jnp.where(jnp.arange(width) < number[:, None], drafts, NOTHING), number


def decode_loop(
    model: Transformer, cache: ModelCache, state: DecodeState, *, steps: int, sampling: Sampling,
    implementation=None, logprobs: bool = False, speculate: int = 0,
) -> tuple[ModelCache, DecodeState, Chosen]:  # fmt: skip
    """Up to `steps` decode steps in one `lax.while_loop`, which ends when every row has stopped.

    Returns:
      (cache, state, what each step chose, with an axis of `steps` before those of `Chosen`).
    """

    def unfinished(carry):
        step, _, state, _ = carry
        return (step < steps) & ~jnp.all(state.done)

    def body(carry):
        step, cache, state, all_chosen = carry
        cache, state, chosen = decode_step(
            model, cache, state, sampling=sampling, implementation=implementation,
            logprobs=logprobs, speculate=speculate,
        )  # fmt: skip
        all_chosen = jax.tree.map(lambda array, new: array.at[step].set(new), all_chosen, chosen)
        return step + 1, cache, state, all_chosen

    shape = (steps, cache.batch, 1 + speculate)
    nothing = Chosen(
        jnp.full(shape, NOTHING, jnp.int32),
        jnp.zeros(shape, jnp.float32) if logprobs else None,
        jnp.zeros(shape[:2], jnp.int32) if speculate else None,
    )
    start = (jnp.zeros((), jnp.int32), cache, state, nothing)
    _, cache, state, chosen = jax.lax.while_loop(unfinished, body, start)
    return cache, state, chosen


# The jitted forms. Parameters are an argument of their own: they are not donated. The cache is, or
# it would be copied. So is what else a step carries on: if results lie where the operands lay, no
# address of a step changes, and XLA replays its CUDA graph without capturing it anew.
_STATIC = ("graph", "sampling", "implementation", "logprobs", "speculate")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("cache", "state"))
def _step(graph, params, cache, state, **options):
    return decode_step(graph.merge(params), cache, state, **options)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "steps"), donate_argnames="cache")
def _loop(graph, params, cache, state, *, steps, **options):
    return decode_loop(graph.merge(params), cache, state, steps=steps, **options)


@functools.partial(jax.jit, static_argnames=("graph", "sampling", "logprobs"))
def _first(graph, params, x, state, *, sampling, logprobs):
    logits = graph.merge(params).logits(x)[:, None]
    return choose(logits, None, state, sampling=sampling, logprobs=logprobs)


@functools.partial(jax.jit, donate_argnames="state")
def _stop(state, rows):
    return dataclasses.replace(state, done=state.done | rows)


class Decoder:
    """A model taken apart once, so that its steps can be called cheaply.

    Args:
      model: the model; its parameters are shared, not copied.
      sampling: how tokens are chosen; another value compiles anew, as the others do.
      implementation: of the attention over the cache.
      logprobs: whether to compute those of the chosen tokens.
      speculate: most tokens drafted in a step.
    """

    def __init__(
        self, model: Transformer, sampling: Sampling, implementation: str | None = None,
        logprobs: bool = False, speculate: int = 0,
    ):  # fmt: skip
        self._model = split(model)
        self._reader = PromptReader(model, implementation)
        self._choice = {"sampling": sampling, "logprobs": logprobs}
        self._options = {
            **self._choice, "implementation": implementation, "speculate": speculate,
        }  # fmt: skip

    def compile(
        self, tokens, lengths, chunks: Sequence[int], cache: ModelCache, state: DecodeState,
        loop_steps: int = 0, stops: bool = False, continues: bool = False,
    ) -> None:  # fmt: skip
        """Compiles what the calls below will need for these shapes; runs no layer.

        Args:
          tokens: as `prefill`.
          lengths: as there.
          chunks: as there.
          cache: as there.
          state: as there.
          loop_steps: of `loop`, which is then called instead of `step`.
          stops: whether `stop` is called too.
          continues: as `prefill`.
        """
        last = self._reader.compile(tokens, lengths, chunks, cache, continues)
        _first.lower(*self._model, last, state, **self._choice).compile()
        if stops:
            _stop.lower(state, np.zeros(cache.batch, bool)).compile()
        if loop_steps:
            _loop.lower(*self._model, cache, state, steps=loop_steps, **self._options).compile()
        else:
            _step.lower(*self._model, cache, state, **self._options).compile()

    def prefill(
        self, tokens, lengths, chunks: Sequence[int], cache: ModelCache, state: DecodeState,
        on_progress: Callable[[int, int], None] | None = None, continues: bool = False,
    ) -> tuple[ModelCache, DecodeState, Chosen]:  # fmt: skip
        """`PromptReader.read`, and the first tokens. Consumes `cache`."""
        last, cache = self._reader.read(tokens, lengths, chunks, cache, on_progress, continues)
        state, chosen = _first(*self._model, last, state, **self._choice)
        return cache, state, chosen

    def step(self, cache: ModelCache, state: DecodeState):
        """`decode_step`, compiled. Consumes `cache` and `state`."""
        return _step(*self._model, cache, state, **self._options)

    def loop(self, cache: ModelCache, state: DecodeState, steps: int):
        """`decode_loop`, compiled for `steps`. Consumes `cache`."""
        return _loop(*self._model, cache, state, steps=steps, **self._options)

    def stop(self, state: DecodeState, rows) -> DecodeState:
        """Ends rows of the mask bool[B] that were stopped by their text. Consumes `state`."""
        return _stop(state, rows)
