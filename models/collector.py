"""Sorts the tokens of each step into rows and turns them into text."""

from __future__ import annotations

import numpy as np

from directkv_jax.models.request import Request
from directkv_jax.models.result import Generation, Piece, Stats
from directkv_jax.models.state import NOTHING, Chosen
from directkv_jax.models.stopping import StopStrings
from directkv_jax.models.tokenizer import Tokenizer


class Collector:
    """The answers so far.

    Attributes:
      halted: bool[B], rows that a stop string has ended. The device does not see text, so it has to
        be told.
      steps: how often tokens were taken.
      drafted: tokens drafted in all rows.
      accepted: those of them that became part of an answer.
      attended: cached tokens that decode steps have read, over all rows.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request):
        self._rows = [_Row(tokenizer, request) for _ in request.lengths]
        self._logprobs, self._prompts = request.options.logprobs, request.lengths.tolist()
        self.halted = np.zeros(len(self._rows), bool)
        self.steps = self.drafted = self.accepted = self.attended = 0

    @property
    def finished(self) -> bool:
        """Whether every row has stopped."""
        return all(row.reason for row in self._rows)

    @property
    def count(self) -> int:
        """Tokens over all rows."""
        return sum(len(row.tokens) for row in self._rows)

    def tokens(self, row: int) -> list[int]:
        """The answer of a row so far."""
        return self._rows[row].tokens

    def take(self, chosen: Chosen) -> list[Piece]:
        """The text that one step adds; `chosen` in NumPy arrays."""
        self.steps += 1
        pieces = []
        for index, row in enumerate(self._rows):
            if row.reason:
                continue
            if self.steps > 1:  # all but the last token, which is in no cache yet
                self.attended += self._prompts[index] + len(row.tokens) - 1
            tokens = chosen.tokens[index].tolist()
            tokens = tokens[: tokens.index(NOTHING)] if NOTHING in tokens else tokens
            if chosen.drafted is not None:
                self.drafted += int(chosen.drafted[index])
                self.accepted += max(0, len(tokens) - 1)
            logprobs = chosen.logprobs[index].tolist() if self._logprobs else []
            if text := row.take(tokens, logprobs):
                pieces.append(Piece(index, text))
            self.halted[index] = row.stop_strings.found
        return pieces

    def result(self, stats: Stats) -> Generation:
        """Everything taken so far."""
        rows = self._rows
        return Generation(
            texts=tuple(row.text for row in rows),
            tokens=tuple(tuple(row.tokens) for row in rows),
            finish_reasons=tuple(row.reason for row in rows),
            stats=stats,
            logprobs=tuple(tuple(row.logprobs) for row in rows) if self._logprobs else None,
        )


class _Row:
    """The answer to one prompt."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        self._stop_tokens = frozenset(request.stop_tokens)
        self._limit = request.options.max_new_tokens
        self._decoder = tokenizer.stream_decoder()
        self.stop_strings = StopStrings(request.options.stop_strings)
        self.text, self.reason = "", ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def take(self, tokens: list[int], logprobs: list[float]) -> str:
        """The text that may be shown after these tokens; none of them means an overflow."""
        text = ""
        for index, token in enumerate(tokens):
            if self.reason:  # a stop string in the midst of several tokens
                break
            if token in self._stop_tokens:
                text += self._end("stop")
                break
            self.tokens.append(token)
            self.logprobs.extend(logprobs[index : index + 1])
            text += self._show(self._decoder.push(token))
            if len(self.tokens) == self._limit and not self.reason:
                text += self._end("length")
        if not tokens:
            text = self._end("overflow")
        self.text += text
        return text

    def _show(self, text: str) -> str:
        text = self.stop_strings.push(text)
        if self.stop_strings.found:
            self.reason = "stop"
        return text

    def _end(self, reason: str) -> str:
        """Ends the row; the last characters may still make up a stop string."""
        text = self._show(self._decoder.flush())
        if not self.reason:
            self.reason = reason
            text += self.stop_strings.flush()
        return text
