"""A request under way: prompts are read into a cache, tokens chosen, and turned into text."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections.abc import Generator, Iterator

import jax
import numpy as np

from directkv_jax import memory
from directkv_jax.models.cache import ModelCache
from directkv_jax.models.collector import Collector
from directkv_jax.models.decoding import Decoder
from directkv_jax.models.request import Options, Request
from directkv_jax.models.result import Generation, Piece, Stats
from directkv_jax.models.sizes import SMALLEST_BUCKET, bucket
from directkv_jax.models.state import Chosen, initial_state
from directkv_jax.models.tokenizer import Tokenizer
from directkv_jax.models.transformer import Transformer


@dataclasses.dataclass
class _Clock:
    """Moments of one call, in seconds."""

    start: float = 0.0
    compiled: float = 0.0
    first: float = 0.0  # all rows have their first token
    last: float = 0.0  # ... their last


class Run:
    """Iterated over once, it gives pieces of text and at the end a `Generation`.

    Args:
      model: the model.
      tokenizer: of the model.
      request: the prompts and how to continue them.
      cache: holds `request.cached` tokens of each row; the run consumes it.
      while_loop: whether to decode in a compiled loop.

    Attributes:
      cache: what has become of the cache so far.
      collector: the answers so far.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, request: Request, cache: ModelCache,
        while_loop: bool = False,
    ):  # fmt: skip
        self.cache, self.collector = cache, Collector(tokenizer, request)
        self._request, self._while_loop, self._clock = request, while_loop, _Clock()
        options = request.options
        self._decoder = Decoder(
            model, options.sampling, options.implementation, options.logprobs, options.speculate
        )
        self._state = initial_state(request, model.config.vocab_size, cache.max_length)

    def __iter__(self) -> Generator[Piece | Generation, None, None]:
        collector, clock, first_tokens = self.collector, self._clock, None
        kv_bytes = self.cache.host_bytes, self.cache.device_bytes
        per_token = sum(part.bytes_per_token for part in self.cache.parts if part.host_bytes)
        with contextlib.closing(self._steps()) as steps:
            for chosen in steps:
                now, before = time.perf_counter(), collector.count
                pieces = collector.take(chosen)
                first_tokens = collector.count if first_tokens is None else first_tokens
                clock.last = now if collector.count > before else clock.last
                yield from pieces
                if collector.finished:
                    break
        later, request = collector.count - (first_tokens or 0), self._request
        decode_s = clock.last - clock.first if later else 0.0
        yield collector.result(
            Stats(
                prompt_tokens=int(request.lengths.sum()),
                cached_tokens=request.cached * len(request.lengths),
                prefill_chunk=request.chunks[0],
                prefill_chunks=len(request.chunks),
                new_tokens=collector.count,
                compile_s=clock.compiled - clock.start,
                ttft_s=clock.first - clock.compiled,
                tokens_per_s=later / decode_s if later else 0.0,
                kv_bytes_host=kv_bytes[0],
                kv_bytes_device=kv_bytes[1],
                host_bytes_per_s=collector.attended * per_token / decode_s if later else 0.0,
                decode_steps=collector.steps - 1,
                drafted=collector.drafted,
                accepted=collector.accepted,
            )
        )

    def free(self) -> None:
        """Frees the cache; one that an error lost after its donation, Python frees."""
        if not self.cache.is_deleted():
            self.cache.lengths.block_until_ready()  # a queued step may still write
            self.cache.delete()

    def _steps(self) -> Generator[Chosen, None, None]:
        """What each step chose, in NumPy arrays, until closed.

        Rows that `collector.halted` names are stopped on the device once they are named.
        """
        request, decoder, clock, halted = (
            self._request, self._decoder, self._clock, self.collector.halted
        )  # fmt: skip
        options, cached = request.options, request.cached
        # Committed like the pages: results of a step are, and a second type would compile again.
        inputs = (request.tokens[:, cached:], request.lengths - np.int32(cached), self._state)
        beside = memory.beside(self.cache.parts[0].pages)
        tokens, lengths, state = jax.device_put(inputs, beside)
        clock.start = time.perf_counter()
        loop_steps = _loop_steps(options, self.cache.max_length) if self._while_loop else 0
        prompts = (tokens, lengths, request.chunks)
        decoder.compile(
            *prompts, self.cache, state, loop_steps, bool(options.stop_strings), cached > 0
        )
        clock.compiled = time.perf_counter()
        self.cache, state, chosen = decoder.prefill(
            *prompts, self.cache, state, options.on_progress, cached > 0
        )
        first = jax.device_get(chosen)
        clock.first = time.perf_counter()
        if options.on_progress:
            total = len(request.chunks) * self.cache.num_layers
            options.on_progress(total, total)
        yield first

        told, pending = np.zeros_like(halted), None
        while True:
            if (halted & ~told).any():
                told = halted.copy()
                state = decoder.stop(state, told)
            if self._while_loop:
                self.cache, state, chosen = decoder.loop(self.cache, state, loop_steps)
                yield from _unstack(jax.device_get(chosen), loop_steps)
                continue
            # The next step is queued before this one's tokens are looked at, so that the device
            # never waits for Python. Rows that stop in between stop on the device as well; those
            # that a stop string ends, one step later.
            self.cache, state, coming = decoder.step(self.cache, state)
            if pending is not None:
                yield jax.device_get(pending)
            pending = coming


def _loop_steps(options: Options, max_length: int) -> int:
    """Steps of one compiled loop: all, unless Python has to look for stop strings in between."""
    if options.stop_strings:
        return SMALLEST_BUCKET
    return bucket(min(options.max_new_tokens, max_length))


def _unstack(chosen: Chosen, steps: int) -> Iterator[Chosen]:
    for step in range(steps):
        yield jax.tree.map(operator.itemgetter(step), chosen)
