"""The compiled pieces of generation: the prompts, a decode step, a loop of steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from directkv_jax.models.cache import ModelCache
from directkv_jax.models.graph import split
from directkv_jax.models.reading import PromptReader
from directkv_jax.models.sampling import Sampling, sample
from directkv_jax.models.transformer import Transformer

NOTHING = -1  # in place of a token: the row had stopped, or its token did not fit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What a step needs to know of the rows, besides the cache. All of it lives on the device.

    Attributes:
      tokens: int32[B], the token chosen last, not in the cache yet.
      keys: one PRNG key for each row.
      count: int32[B], tokens chosen so far.
      done: bool[B], rows that have stopped; they are neither read nor written any more.
      limit: int32[], tokens after which a row stops.
      stop_tokens: int32[S], tokens that stop a row, padded with `NOTHING`.
    """

    tokens: jax.Array
    keys: jax.Array
    count: jax.Array
    done: jax.Array
    limit: jax.Array
    stop_tokens: jax.Array


def decode_step(
    model: Transformer,
    cache: ModelCache,
    state: DecodeState,
    *,
    sampling: Sampling,
    implementation=None,
) -> tuple[ModelCache, DecodeState, jax.Array]:
    """Puts the last token of each running row into the cache and chooses the next.

    Returns:
      (cache, state, int32[B]: the tokens chosen, `NOTHING` for stopped rows). A stop token is
      returned like any other. A row whose token no longer fits into the cache stops.
    """
    running = (~state.done).astype(jnp.int32)
    logits, cache = model(state.tokens[:, None], cache, running, implementation=implementation)
    state = dataclasses.replace(state, done=state.done | cache.overflowed)
    state, chosen = _choose(logits[:, 0], state, sampling)
    return cache, state, chosen


def decode_loop(
    model: Transformer, cache: ModelCache, state: DecodeState, *, steps: int, sampling: Sampling,
    implementation=None,
) -> tuple[ModelCache, DecodeState, jax.Array]:  # fmt: skip
    """Up to `steps` decode steps in one `lax.while_loop`, which ends when every row has stopped.

    Returns:
      (cache, state, int32[B, steps]: as `decode_step` returns them, one column for each).
    """

    def unfinished(carry):
        step, _, state, _ = carry
        return (step < steps) & ~jnp.all(state.done)

    def body(carry):
        step, cache, state, chosen = carry
        cache, state, tokens = decode_step(
            model, cache, state, sampling=sampling, implementation=implementation
        )
        return step + 1, cache, state, jax.lax.dynamic_update_index_in_dim(chosen, tokens, step, 1)

    chosen = jnp.full((cache.batch, steps), NOTHING, jnp.int32)
    start = (jnp.zeros((), jnp.int32), cache, state, chosen)
    _, cache, state, chosen = jax.lax.while_loop(unfinished, body, start)
    return cache, state, chosen


def _choose(logits: jax.Array, state: DecodeState, sampling: Sampling):
    tokens = sample(logits, state.keys, state.count, sampling)
    count = state.count + ~state.done
    stops = jnp.any(tokens[:, None] == state.stop_tokens, axis=1) | (count >= state.limit)
    chosen = jnp.where(state.done, NOTHING, tokens)
    tokens = jnp.where(state.done, state.tokens, tokens)
    done = state.done | stops
    return dataclasses.replace(state, tokens=tokens, count=count, done=done), chosen


# The jitted forms. Parameters are an argument of their own: they are not donated. The cache is, or
# it would be copied. So is what else a step carries on: if results lie where the operands lay, no
# address of a step changes, and XLA replays its CUDA graph without capturing it anew.
_STATIC = ("graph", "sampling", "implementation")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("cache", "state"))
def _step(graph, params, cache, state, *, sampling, implementation):
    model = graph.merge(params)
    return decode_step(model, cache, state, sampling=sampling, implementation=implementation)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "steps"), donate_argnames="cache")
def _loop(graph, params, cache, state, *, steps, sampling, implementation):
    model = graph.merge(params)
    return decode_loop(
        model, cache, state, steps=steps, sampling=sampling, implementation=implementation
    )


@functools.partial(jax.jit, static_argnames=("graph", "sampling"))
def _first(graph, params, x, state, *, sampling):
    return _choose(graph.merge(params).logits(x), state, sampling)


class Decoder:
    """A model taken apart once, so that its steps can be called cheaply.

    Args:
      model: the model; its parameters are shared, not copied.
      sampling: how tokens are chosen; another value compiles anew.
      implementation: of the attention over the cache.
    """

    def __init__(self, model: Transformer, sampling: Sampling, implementation: str | None = None):
        self._model = split(model)
        self._reader = PromptReader(model, implementation)
        self._sampling = {"sampling": sampling}
        self._implementation = {"implementation": implementation}

    def compile(
        self, tokens, lengths, chunks: Sequence[int], cache: ModelCache, state: DecodeState,
        loop_steps: int = 0,
    ) -> None:  # fmt: skip
        """Compiles what the calls below will need for these shapes; runs no layer."""
        last = self._reader.compile(tokens, lengths, chunks, cache)
        _first.lower(*self._model, last, state, **self._sampling).compile()
        options = {**self._sampling, **self._implementation}
        if loop_steps:
            _loop.lower(*self._model, cache, state, steps=loop_steps, **options).compile()
        else:
            _step.lower(*self._model, cache, state, **options).compile()

    def prefill(
        self, tokens, lengths, chunks: Sequence[int], cache: ModelCache, state: DecodeState,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> tuple[ModelCache, DecodeState, jax.Array]:  # fmt: skip
        """`PromptReader.read`, and the first tokens. Consumes `cache`."""
        last, cache = self._reader.read(tokens, lengths, chunks, cache, on_progress)
        state, chosen = _first(*self._model, last, state, **self._sampling)
        return cache, state, chosen

    def step(self, cache: ModelCache, state: DecodeState):
        """`decode_step`, compiled. Consumes `cache` and `state`."""
        return _step(*self._model, cache, state, **self._sampling, **self._implementation)

    def loop(self, cache: ModelCache, state: DecodeState, steps: int):
        """`decode_loop`, compiled for `steps`. Consumes `cache`."""
        options = {**self._sampling, **self._implementation}
        return _loop(*self._model, cache, state, steps=steps, **options)
