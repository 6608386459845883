"""What generation returns: pieces of text, and at the end tokens, reasons and figures."""

from __future__ import annotations

import dataclasses

import numpy as np

from directkv_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Piece:
    """A bit of text as it comes.

    Attributes:
      row: which prompt it continues.
      text: never an incomplete character.
    """

    row: int
    text: str


@dataclasses.dataclass(frozen=True)
class Stats:
    """Figures of one call.

    Attributes:
      prompt_tokens: over all rows.
      prefill_chunk: tokens of each prompt read at once, padding included; the last may be fewer.
      prefill_chunks: how often that was.
      new_tokens: over all rows.
      compile_s: seconds to compile; near 0 for shapes seen before.
      ttft_s: seconds from the encoded prompt to the first tokens of all rows, compilation excluded.
      tokens_per_s: tokens of all rows after the first ones, per second; 0 if there are none.
      kv_bytes_host: size of the cache in host memory.
      kv_bytes_device: size of the cache in device memory.
    """

    prompt_tokens: int
    prefill_chunk: int
    prefill_chunks: int
    new_tokens: int
    compile_s: float
    ttft_s: float
    tokens_per_s: float
    kv_bytes_host: int
    kv_bytes_device: int


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result for a batch of prompts, one entry for each.

    Attributes:
      texts: the answers.
      tokens: their token ids, without the one that stopped them.
      finish_reasons: "stop" (a stop token), "length" (`max_new_tokens`) or "overflow" (the cache
        was full).
      stats: figures.
    """

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    stats: Stats


class Collector:
    """Sorts the tokens of each step into rows and turns them into text."""

    def __init__(self, tokenizer: Tokenizer, batch: int, limit: int, stop_tokens: tuple[int, ...]):
        self._stop, self._limit = frozenset(stop_tokens), limit
        self._decoders = [tokenizer.stream_decoder() for _ in range(batch)]
        self.texts = [""] * batch
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.reasons = [""] * batch

    @property
    def finished(self) -> bool:
        """Whether every row has stopped."""
        return all(self.reasons)

    @property
    def count(self) -> int:
        """Tokens over all rows."""
        return sum(map(len, self.tokens))

    def take(self, chosen: np.ndarray) -> list[Piece]:
        """The text that one step adds; `chosen` int32[B] as `decode_step` returns it."""
        return [
            piece
            for row, token in enumerate(chosen.tolist())
            if not self.reasons[row] and (piece := self._take(row, token)).text
        ]

    def _take(self, row: int, token: int) -> Piece:
        text = ""
        if token < 0:
            self.reasons[row] = "overflow"
        elif token in self._stop:
            self.reasons[row] = "stop"
        else:
            self.tokens[row].append(token)
            text = self._decoders[row].push(token)
            if len(self.tokens[row]) == self._limit:
                self.reasons[row] = "length"
        if self.reasons[row]:
            text += self._decoders[row].flush()
        self.texts[row] += text
        return Piece(row, text)

    def result(self, stats: Stats) -> Generation:
        """Everything taken so far."""
        tokens = tuple(map(tuple, self.tokens))
        return Generation(tuple(self.texts), tokens, tuple(self.reasons), stats)
