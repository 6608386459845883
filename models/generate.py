"""Text in, text out: `generate`, `complete` and `stream` over a cache in host or device memory."""

from __future__ import annotations

from collections.abc import Generator

from directkv_jax.models.prompts import Prompts
from directkv_jax.models.request import Options, Request, prepare
from directkv_jax.models.result import Generation, Piece
from directkv_jax.models.running import Run
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


def _run(
    model: Transformer, tokenizer: Tokenizer, request: Request, while_loop: bool
) -> Generator[Piece | Generation, None, None]:
    """A run on a cache of its own."""
    options = request.options
    cache = model.create_cache(
        len(request.lengths), request.max_length, page_size=options.page_size,
        placement=options.placement, rollback=options.speculate,
    )  # fmt: skip
    run = Run(model, tokenizer, request, cache, while_loop)
    try:
        yield from run
    finally:
        run.free()
