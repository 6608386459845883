"""What generation returns: pieces of text, and at the end tokens, reasons and figures."""

from __future__ import annotations

import dataclasses


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
      cached_tokens: those of them that were in the cache already and not read again.
      prefill_chunk: tokens of each prompt read at once, padding included; the last may be fewer.
      prefill_chunks: how often that was.
      new_tokens: over all rows.
      compile_s: seconds to compile; near 0 for shapes seen before.
      ttft_s: seconds from the encoded prompt to the first tokens of all rows, compilation excluded.
      tokens_per_s: tokens of all rows after the first ones, per second; 0 if there are none.
      kv_bytes_host: size of the cache in host memory.
      kv_bytes_device: size of the cache in device memory.
      host_bytes_per_s: keys and values that decoding read from host memory, per second; 0 if none.
      decode_steps: calls of the model that gave tokens, after those that read the prompts.
      drafted: tokens that were drafted for such a call, over all rows.
      accepted: drafted tokens that the model chose too.
    """

    prompt_tokens: int
    cached_tokens: int
    prefill_chunk: int
    prefill_chunks: int
    new_tokens: int
    compile_s: float
    ttft_s: float
    tokens_per_s: float
    kv_bytes_host: int
    kv_bytes_device: int
    host_bytes_per_s: float
    decode_steps: int
    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """The accepted part of the drafted tokens; 0 if there are none."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result for a batch of prompts, one entry for each.

    Attributes:
      texts: the answers, cut before a stop string.
      tokens: their token ids, without the one that stopped them.
      finish_reasons: "stop" (a stop token or string), "length" (`max_new_tokens`) or "overflow"
        (the cache was full).
      stats: figures.
      logprobs: of each of `tokens`, if `Options.logprobs` asked for them; else None.
    """

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    stats: Stats
    logprobs: tuple[tuple[float, ...], ...] | None = None
