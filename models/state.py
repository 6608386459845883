"""What a decode step hands to the next one, and how it chooses tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax.models.lookup import History
from directkv_jax.models.request import Request
from directkv_jax.models.sampling import Sampling, row_keys, sample
from directkv_jax.models.sizes import bucket

NOTHING = -1  # in place of a token: the row had stopped, or has no more of them in this step


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
      seen: bool[B, V], tokens of prompt and answer; None without a repetition penalty.
      history: those tokens in their order; None unless tokens are drafted.
    """

    tokens: jax.Array
    keys: jax.Array
    count: jax.Array
    done: jax.Array
    limit: jax.Array
    stop_tokens: jax.Array
    seen: jax.Array | None = None
    history: History | None = None

    def take(self, tokens: jax.Array, mask: jax.Array) -> DecodeState:
        """One more token, int32[B], in the rows of the mask bool[B]."""
        count, seen, history = self.count + mask, self.seen, self.history
        stops = jnp.any(tokens[:, None] == self.stop_tokens, axis=1) | (count >= self.limit)
        if seen is not None:
            column = jnp.where(mask, tokens, seen.shape[1])  # out of range, so dropped
            seen = seen.at[jnp.arange(tokens.shape[0]), column].set(True, mode="drop")
        return dataclasses.replace(
            self,
            tokens=jnp.where(mask, tokens, self.tokens),
            count=count,
            done=self.done | (mask & stops),
            seen=seen,
            history=history and history.append(tokens, mask),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The tokens that one step chose: W for each row, `NOTHING` after the last.

    Attributes:
      tokens: int32[B, W]. A row with none had stopped or has outgrown the cache.
      logprobs: float32[B, W], the log-softmax of the logits at `tokens`; None if not asked for.
      drafted: int32[B], how many of them were drafted before; None unless tokens are drafted.
    """

    tokens: Any
    logprobs: Any = None
    drafted: Any = None


def choose(
    logits: jax.Array,
    drafts: jax.Array | None,
    state: DecodeState,
    *,
    sampling: Sampling,
    logprobs: bool = False,
) -> tuple[DecodeState, Chosen]:
    """Chooses the next token of each running row, and the ones after while drafts prove right.

    Args:
      logits: float32[B, W, V], after the last token and after each of the drafts.
      drafts: int32[B, W - 1], padded with `NOTHING`; None for W = 1.
      state: of the rows.
      sampling: how a token is chosen.
      logprobs: whether to compute them.

    Returns:
      (state, what was chosen, without `drafted`).
    """
    columns, running = [], ~state.done
    for index in range(logits.shape[1]):
        tokens = sample(logits[:, index], state.keys, state.count, sampling, state.seen)
        columns.append(jnp.where(running, tokens, NOTHING))
        state = state.take(tokens, running)
        if drafts is not None and index < drafts.shape[1]:
            running &= ~state.done & (tokens == drafts[:, index])
    chosen = jnp.stack(columns, axis=1)
    return state, Chosen(chosen, _logprobs(logits, chosen) if logprobs else None)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def initial_state(request: Request, vocab_size: int, max_length: int) -> DecodeState:
    """The state before the prompts are read.

    Args:
      request: the prompts and how to continue them.
      vocab_size: V, of the logits.
      max_length: tokens that a row of the cache holds.
    """
    options, batch = request.options, len(request.lengths)
    # Padded, so that their number is not a shape.
    stop = np.full(bucket(len(request.stop_tokens)), NOTHING, np.int32)
    stop[: len(request.stop_tokens)] = request.stop_tokens
    seen = history = None
    if options.sampling.penalizes:
        seen = np.zeros((batch, vocab_size), bool)
        for row, (tokens, length) in enumerate(zip(request.tokens, request.lengths, strict=True)):
            seen[row, tokens[:length]] = True
    if options.speculate:
        # One more than the cache holds: the token chosen last is not in it.
        tokens = np.zeros((batch, max_length + 1), np.int32)
        known = request.tokens[:, : max_length + 1]  # what is cut off is padding
        tokens[:, : known.shape[1]] = known
        history = History(jnp.asarray(tokens), jnp.asarray(request.lengths))
    return DecodeState(
        tokens=jnp.zeros(batch, jnp.int32),
        keys=row_keys(options.seed, batch),
        count=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, jnp.bool_),
        limit=jnp.int32(options.max_new_tokens),
        stop_tokens=jnp.asarray(stop),
        seen=None if seen is None else jnp.asarray(seen),
        history=history,
    )
