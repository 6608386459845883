"""Text in, text out: `generate`, `complete` and `stream` over a cache in host or device memory."""

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
from directkv_jax.models.request import Options, Prompts, Request, prepare
from directkv_jax.models.result import Generation, Piece, Stats
from directkv_jax.models.sizes import SMALLEST_BUCKET, bucket
from directkv_jax.models.state import Chosen, DecodeState, initial_state
from directkv_jax.models.tokenizer import Tokenizer
from directkv_jax.models.transformer import Transformer


def generate(
    model: Transformer, tokenizer: Tokenizer, prompts: Prompts, **options
) -> str | list[str]:
    """The continuation of a prompt: a str for one text, a list for a list of prompts.

    Example::

      model, tokenizer = load("SmolLM2-135M-Instruct.gguf")
      generate(model, tokenizer, "The capital of France is", max_new_tokens=8)

    Args:
      model: from `load`.
      tokenizer: from `load`.
      prompts: a text, several texts, or several lists of token ids. Texts are taken as they are;
        for a chat pass `[tokenizer.encode_chat(messages)]`.
      **options: as `Options`.

    Raises:
      TypeError, ValueError, NotImplementedError, MemoryError: as `stream`.
    """
    texts = complete(model, tokenizer, prompts, **options).texts
    return texts[0] if isinstance(prompts, str) else list(texts)


def complete(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Prompts,
    *,
    while_loop: bool = False,
    **options,
) -> Generation:
    """Like `generate`, with the tokens, the reason each row stopped for, and figures.

    Args:
      model: from `load`.
      tokenizer: from `load`.
      prompts: as `generate`.
      while_loop: decode in one compiled `lax.while_loop` that does not return to Python for each
        token; the tokens are the same. `max_new_tokens`, rounded up to a power of two, is then
        part of what is compiled. With stop strings it does return, after every 16 steps.
      **options: as `Options`.

    Raises:
      TypeError, ValueError, NotImplementedError, MemoryError: as `stream`.
    """
    request = prepare(model, tokenizer, prompts, Options(**options))
    *_, generation = _run(model, tokenizer, request, while_loop)
    assert isinstance(generation, Generation)
    return generation


def stream(
    model: Transformer, tokenizer: Tokenizer, prompts: Prompts, **options
) -> Generator[Piece | Generation, None, None]:
    """Yields a `Piece` for every bit of text as it comes, and a `Generation` at the end.

    Only the sizes of the chunks that the prompts are read in (the last one is a power of two), the
    batch, the size of the cache, `sampling`, `logprobs` and `speculate` are compiled in: no step
    compiles again. The cache is freed when the iterator ends or is closed.

    Args:
      model: from `load`.
      tokenizer: from `load`.
      prompts: as `generate`.
      **options: as `Options`.

    Raises:
      TypeError, ValueError: an argument is wrong, or a prompt is empty or longer than the cache.
      NotImplementedError: the named implementation cannot do this here.
      MemoryError: the memory for the cache cannot be had.
    """
    return _run(model, tokenizer, prepare(model, tokenizer, prompts, Options(**options)), False)


@dataclasses.dataclass
class _Clock:
    """Moments of one call, in seconds."""

    start: float = 0.0
    compiled: float = 0.0
    first: float = 0.0  # all rows have their first token
    last: float = 0.0  # ... their last


def _run(
    model: Transformer, tokenizer: Tokenizer, request: Request, while_loop: bool
) -> Generator[Piece | Generation, None, None]:
    options, batch = request.options, len(request.lengths)
    collector = Collector(tokenizer, request)
    decoder = Decoder(
        model, options.sampling, options.implementation, options.logprobs, options.speculate
    )
    cache = model.create_cache(
        batch, request.max_length, page_size=options.page_size, placement=options.placement,
        rollback=options.speculate,
    )  # fmt: skip
    state = initial_state(request, model.config.vocab_size, cache.max_length)
    kv_bytes, clock, first_tokens = (cache.host_bytes, cache.device_bytes), _Clock(), None
    steps = _decode(request, decoder, cache, state, clock, collector.halted, while_loop)
    with contextlib.closing(steps):
        for chosen in steps:
            now, before = time.perf_counter(), collector.count
            pieces = collector.take(chosen)
            first_tokens = collector.count if first_tokens is None else first_tokens
            clock.last = now if collector.count > before else clock.last
            yield from pieces
            if collector.finished:
                break
    later = collector.count - (first_tokens or 0)
    yield collector.result(
        Stats(
            prompt_tokens=int(request.lengths.sum()),
            prefill_chunk=request.chunks[0],
            prefill_chunks=len(request.chunks),
            new_tokens=collector.count,
            compile_s=clock.compiled - clock.start,
            ttft_s=clock.first - clock.compiled,
            tokens_per_s=later / (clock.last - clock.first) if later else 0.0,
            kv_bytes_host=kv_bytes[0],
            kv_bytes_device=kv_bytes[1],
            decode_steps=collector.steps - 1,
            drafted=collector.drafted,
            accepted=collector.accepted,
        )
    )


def _decode(
    request: Request, decoder: Decoder, cache: ModelCache, state: DecodeState, clock: _Clock,
    halted: np.ndarray, while_loop: bool,
) -> Generator[Chosen, None, None]:  # fmt: skip
    """What each step chose, in NumPy arrays, until closed. Owns the cache and frees it.

    Rows of the mask `halted`, bool[B], are stopped on the device once they are set.
    """
    try:
        # Committed like the pages: results of a step are, and a second type would compile again.
        inputs = (request.tokens, request.lengths, state)
        tokens, lengths, state = jax.device_put(inputs, memory.beside(cache.parts[0].pages))
        options, clock.start = request.options, time.perf_counter()
        loop_steps = _loop_steps(options) if while_loop else 0
        prompts = (tokens, lengths, request.chunks)
        decoder.compile(*prompts, cache, state, loop_steps, bool(options.stop_strings))
        clock.compiled = time.perf_counter()
        cache, state, chosen = decoder.prefill(*prompts, cache, state, options.on_progress)
        first = jax.device_get(chosen)
        clock.first = time.perf_counter()
        if options.on_progress:
            total = len(request.chunks) * cache.num_layers
            options.on_progress(total, total)
        yield first

        told, pending = np.zeros_like(halted), None
        while True:
            if (halted & ~told).any():
                told = halted.copy()
                state = decoder.stop(state, told)
            if while_loop:
                cache, state, chosen = decoder.loop(cache, state, loop_steps)
                yield from _unstack(jax.device_get(chosen), loop_steps)
                continue
            # The next step is queued before this one's tokens are looked at, so that the device
            # never waits for Python. Rows that stop in between stop on the device as well; those
            # that a stop string ends, one step later.
            cache, state, coming = decoder.step(cache, state)
            if pending is not None:
                yield jax.device_get(pending)
            pending = coming
    finally:
        # Unless an error came between donation and assignment; then Python frees it.
        if not cache.is_deleted():
            cache.lengths.block_until_ready()  # a queued step may still write
            cache.delete()


def _loop_steps(options: Options) -> int:
    """Steps of one compiled loop: all, unless Python has to look for stop strings in between."""
    return SMALLEST_BUCKET if options.stop_strings else bucket(options.max_new_tokens)


def _unstack(chosen: Chosen, steps: int) -> Iterator[Chosen]:
    for step in range(steps):
        yield jax.tree.map(operator.itemgetter(step), chosen)
