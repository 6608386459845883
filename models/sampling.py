"""From logits to the next token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Static under jit: another value compiles another step.

    These apply in this order, each on what the one before left:
    `repetition_penalty` changes the logits of tokens that the row holds already; temperature
    divides the logits; `top_k` keeps the k largest; `top_p` keeps the smallest set of
    most probable tokens whose probabilities sum to at least p (always at least one); `min_p` keeps
    those at least that part as probable as the most probable one.

    Attributes:
      temperature: 0 is greedy: the most probable token, the lowest id among equals. `top_k`,
        `top_p` and `min_p` then change nothing.
      top_k: how many tokens remain, None for all.
      top_p: in (0, 1]; 1 for all.
      min_p: in [0, 1]; 0 for all.
      repetition_penalty: positive; divides the logits above 0, and multiplies those below, of every
        token of the prompt and the answer so far. 1 is off, and keeps no record of them.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            try:
                if isinstance(value, str | bytes):
                    raise TypeError
                object.__setattr__(self, name, float(value))  # a NumPy number too
            except (TypeError, ValueError, OverflowError):
                raise TypeError(f"`{name}` should be a number, but got {value!r:.80}.") from None
        if isinstance(self.top_k, np.integer):
            object.__setattr__(self, "top_k", int(self.top_k))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"`temperature` should be 0 or more, but got {self.temperature}.")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"`top_k` should be a positive int or None, but got {self.top_k!r}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` should be in (0, 1], but got {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"`min_p` should be in [0, 1], but got {self.min_p}.")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                "`repetition_penalty` should be a positive number, 1 for none, but got "
                f"{self.repetition_penalty}."
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1


GREEDY = Sampling()
_TEMPERATURES = 1e-30, 1e30  # beyond them draws are the same, and float32 ends


def row_keys(seed: int | Sequence[int], batch: int) -> jax.Array:
    """One PRNG key for each row.

    Of one seed, row i draws the same whatever the other rows are. Of a seed for each row, a row
    draws what it draws alone with that seed, wherever in the batch it is.
    """
    if isinstance(seed, int):
        keys, index = jax.random.key(seed), jnp.arange(batch, dtype=jnp.uint32)
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(keys, index)
    return jnp.concatenate([row_keys(int(each), 1) for each in seed])


def sample(
    logits: jax.Array,
    keys: jax.Array,
    step: jax.Array,
    sampling: Sampling,
    seen: jax.Array | None = None,
) -> jax.Array:
    """Chooses one token for each row.

    Args:
      logits: float32[B, V].
      keys: one key for each row, as `row_keys` makes them.
      step: int32[B], how many tokens the row has drawn before; folded into its key.
      sampling: the filters.
      seen: bool[B, V], the tokens of each row so far; used by a repetition penalty alone.

    Returns:
      int32[B].
    """
    if sampling.penalizes:
        penalty = sampling.repetition_penalty
        penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, penalized, logits)
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    values, ids = jax.lax.top_k(logits, kept)
    # From the largest one down, so that none becomes infinite however low the temperature is.
    low, high = _TEMPERATURES
    values = (values - values[:, :1]) / min(max(sampling.temperature, low), high)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(values, axis=-1)
        # What stands before a token, not with it, decides: the token that reaches p stays.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        values = jnp.where(before < sampling.top_p, values, -jnp.inf)
    if sampling.min_p > 0:
        least = values[:, :1] + math.log(sampling.min_p)
        values = jnp.where(values >= least, values, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in)(keys, step.astype(jnp.uint32))
    chosen = jax.vmap(jax.random.categorical)(keys, values)
    return jnp.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)
