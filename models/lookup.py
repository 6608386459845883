"""Drafts by prompt lookup: what followed the last tokens of a row where they stood before.

The method of Saxena, "Prompt Lookup Decoding" (2023): answers that repeat their prompt, as
summaries and edits of code do, are read off it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

LONGEST_NGRAM = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """The tokens of each row, of prompt and answer.

    Attributes:
      tokens: int32[B, S]; those from `lengths` on mean nothing.
      lengths: int32[B], at least 1.
    """

    tokens: jax.Array
    lengths: jax.Array

    def append(self, tokens: jax.Array, mask: jax.Array) -> History:
        """One more token, int32[B], in the rows of the mask bool[B]."""
        size = self.tokens.shape[1]
        column = jnp.where(mask, self.lengths, size)  # out of range, so dropped
        rows = jnp.arange(tokens.shape[0])
        return History(self.tokens.at[rows, column].set(tokens, mode="drop"), self.lengths + mask)

    def draft(self, width: int) -> tuple[jax.Array, jax.Array]:
        """`width` tokens that may come next in each row.

        They are copied from after the most recent earlier occurrence of the last 3 tokens, else of
        the last 2, else of the last one. A copy that reaches the end goes on with its own tokens,
        as in LZ77: a row that repeats itself is drafted as far as the width goes.

        Returns:
          (int32[B, width], bool[B]: whether there was an occurrence).
        """
        size, length = self.tokens.shape[1], self.lengths[:, None]
        start = jnp.arange(size, dtype=jnp.int32)[None]  # where a copy might begin
        equal, ngram = start < length, jnp.zeros_like(self.tokens)
        for n in range(1, LONGEST_NGRAM + 1):
            last = jnp.take_along_axis(self.tokens, jnp.maximum(length - n, 0), axis=1)
            equal &= (jnp.roll(self.tokens, n, axis=1) == last) & (start >= n)
            ngram += equal
        # The longest n-gram is best, then the last place.
        score = jnp.where(ngram > 0, ngram * size + start, 0)
        best = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
        copied = best + jnp.arange(width, dtype=jnp.int32) % (length - best)
        return jnp.take_along_axis(self.tokens, copied, axis=1), jnp.max(score, axis=1) > 0
