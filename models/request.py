"""Checks and completes what `generate` and `stream` are asked, before anything is compiled."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Sequence, Set

import jax
import numpy as np

from directkv_jax._layout import MAX_LENGTH, check_page_size
from directkv_jax.models.config import ModelConfig
from directkv_jax.models.prompts import Prompts, encode_all, ids
from directkv_jax.models.sampling import GREEDY, Sampling
from directkv_jax.models.sizes import CPU_CHUNK, capacity, chunk_sizes, chunk_tokens
from directkv_jax.models.tokenizer import Tokenizer
from directkv_jax.models.transformer import Transformer

MAX_SPECULATE = 64  # drafts; each is a part of the compiled step, and hardly any text repeats more

# Called with (layers of the prefill done, layers), both counted over all chunks of the prompts.
OnProgress = Callable[[int, int], None]


_SIZES = ("max_new_tokens", "max_length", "prefill_chunk", "prefill_bytes")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to generate; the keyword arguments of `generate`, `complete` and `stream`.

    Attributes:
      max_new_tokens: most tokens for each prompt.
      max_length: tokens, of prompt and answer, that the cache holds for each row; rounded up to
        whole pages. None makes it large enough. A row that outgrows it stops with "overflow".
      sampling: how tokens are chosen; greedy by default. Another value compiles anew.
      seed: of the random choices. An int seeds row i by its index: it draws the same whatever the
        other rows are. A sequence has a seed for each row: it draws the same alone, with that seed,
        and anywhere in a batch. Both up to the rounding of the logits.
      stop_tokens: tokens that end an answer; None takes the tokenizer's. They are not returned.
      stop_strings: texts that end an answer as soon as it contains one; the text is cut before it.
        What may become one is held back from a stream. `Generation.tokens` keeps the tokens up to
        and with the one that completed it. Special tokens have no text: see `stop_tokens`.
      logprobs: whether to return the natural logarithm of each token's probability in
        `Generation.logprobs`. It is that of the model itself: float32 log-softmax of its logits,
        before penalty, temperature and filters.
      speculate: most tokens that a step drafts (prompt-lookup decoding): what followed the last 3,
        2 or 1 tokens of the row where they stood before. One call of the model reads the drafts,
        and those that equal its own choices are kept, so the tokens are the same. A call of several
        tokens may round otherwise, so that near ties fall otherwise in 16-bit dtypes. It saves time
        where reading weights and cache takes most of a step, and costs time where multiplying does.
        Greedy alone; 0 is off, 64 the most. Another value compiles anew.
      placement: where keys and values live, "host" or "device".
      implementation: "cuda", "cpu", "xla" or "reference"; None picks the best that reads the cache
        where it lies.
      page_size: tokens per page of the cache.
      prefill_chunk: tokens of each prompt that are read at once; the first ones attend on the
        device, the later ones to the cache too. None chooses it by `prefill_bytes`. Results are the
        same up to rounding.
      prefill_bytes: device memory, in bytes, that the activations of one layer may take while the
        prompts are read (`sizes.layer_bytes`): the chunk is the largest power of two within it, and
        16 tokens if even these are not. On a CPU it is 512 tokens at most.
      on_progress: called with (layers done, layers), both counted over all chunks, while the
        prompts are read.
    """

    max_new_tokens: int = 128
    max_length: int | None = None
    sampling: Sampling = GREEDY
    seed: int | Sequence[int] = 0
    stop_tokens: Collection[int] | None = None
    stop_strings: Sequence[str] = ()
    logprobs: bool = False
    speculate: int = 0
    placement: str = "host"
    implementation: str | None = None
    page_size: int = 64
    prefill_chunk: int | None = None
    prefill_bytes: int = 1 << 30
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        for name in (*_SIZES, "page_size", "speculate", "seed"):
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))
        for name in _SIZES:
            value = getattr(self, name)
            if name in ("max_length", "prefill_chunk") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` should be a positive int, but got {value!r}.")
            if value > MAX_LENGTH and name != "prefill_bytes":
                raise ValueError(f"`{name}` should be at most {MAX_LENGTH}, but got {value}.")
        check_page_size(self.page_size)
        seeds = (self.seed,) if isinstance(self.seed, int) else self.seed
        if not isinstance(seeds, Sequence) or not all(map(_is_seed, seeds)):
            raise ValueError(
                "`seed` should be an int in [0, 2**32), or one for each prompt, but got "
                f"{self.seed!r}."
            )
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"`sampling` should be a Sampling, but got {self.sampling!r}.")
        if not isinstance(self.implementation, str | None):
            raise TypeError(f"`implementation` should be a str, but got {self.implementation!r}.")
        self._check_stop_strings()
        self._check_speculate()
        if self.placement not in ("host", "device"):
            raise ValueError(
                f'`placement` should be "host" or "device", but got {self.placement!r}.'
            )

    def _check_stop_strings(self) -> None:
        strings = self.stop_strings
        # A str is a sequence of str too, and would stop at each of its characters.
        if isinstance(strings, str) or not isinstance(strings, Sequence):
            raise TypeError(f"`stop_strings` should be a sequence of str, but got {strings!r}.")
        if not all(isinstance(string, str) for string in strings):
            raise TypeError(f"`stop_strings` should hold str alone, but got {strings!r}.")
        if "" in strings:
            raise ValueError(
                "`stop_strings` should hold no empty string, which every text contains, but got "
                f"{strings!r}."
            )

    def _check_speculate(self) -> None:
        drafts = self.speculate
        if type(drafts) is not int or not 0 <= drafts <= MAX_SPECULATE:
            raise ValueError(
                f"`speculate` should be an int in [0, {MAX_SPECULATE}], but got {drafts!r}."
            )
        if drafts and not self.sampling.greedy:
            raise ValueError(
                f"`speculate` needs greedy sampling, but got temperature "
                f"{self.sampling.temperature}. Leave out `speculate`, or set the temperature to 0."
            )


def _is_seed(value) -> bool:
    return isinstance(value, (int, np.integer)) and 0 <= value < 2**32


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompts ready for the device.

    Attributes:
      tokens: int32[B, `cached` + sum of `chunks`], padded with 0.
      lengths: int32[B], tokens of each prompt.
      chunks: how many tokens of each prompt are read at once, chunk by chunk.
      max_length: tokens each row of the cache should hold.
      stop_tokens: what ends an answer.
      options: the rest.
      cached: how many tokens of each prompt are in the cache already.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    chunks: tuple[int, ...]
    max_length: int
    stop_tokens: tuple[int, ...]
    options: Options
    cached: int = 0


def prepare(
    model: Transformer, tokenizer: Tokenizer, prompts: Prompts, options: Options, cached: int = 0
) -> Request:
    """Encodes and pads prompts, and chooses the size of the cache.

    Args:
      model: the model.
      tokenizer: of the model.
      prompts: as of `generate`.
      options: how to continue them.
      cached: tokens of each prompt that a cache has already; fewer than any prompt has.

    Raises:
      TypeError: `prompts` is of another kind.
      ValueError: a prompt is empty, longer than the cache or holds unknown ids, or there is not one
        seed for each.
    """
    rows = encode_all(tokenizer, prompts)
    if not isinstance(options.seed, int) and len(options.seed) != len(rows):
        raise ValueError(
            f"`seed` should be an int or have one for each of the {len(rows)} prompts, but has "
            f"{len(options.seed)}."
        )
    for index, row in enumerate(rows):
        _check_row(index, row, model.config.vocab_size, options)
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max())
    chunk = options.prefill_chunk or chunk_tokens(
        model.config, model.dtype, len(rows), options.prefill_bytes
    )
    if options.prefill_chunk is None and jax.default_backend() == "cpu":
        chunk = min(chunk, CPU_CHUNK)
    chunks = chunk_sizes(longest - cached, chunk)
    tokens = np.zeros((len(rows), cached + sum(chunks)), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    given = options.stop_tokens
    given = list(given) if isinstance(given, Set) else given
    stop = tokenizer.eos_ids if given is None else tuple(ids("stop_tokens", given))
    if not all(0 <= token < 1 << 31 for token in stop):
        raise ValueError(f"`stop_tokens` should be token ids, but got {stop}.")
    # The last token is chosen but never put into the cache.
    reached = longest + options.max_new_tokens - 1
    needed = options.max_length or capacity(reached)
    _check_context(model.config, min(reached, needed))
    return Request(tokens, lengths, chunks, needed, stop, options, cached)


def _check_context(config: ModelConfig, reached: int) -> None:
    """Warns of texts longer than those of the training; learned positions end there."""
    if config.learned_positions:
        positions = config.learned_positions - config.position_offset
        if reached > positions:
            raise ValueError(
                f"prompt and answer may grow to {reached} tokens, but this model has positions for "
                f"{positions}. Shorten the prompt or lower `max_new_tokens`."
            )
    if reached > (longest := config.max_position_embeddings):
        ropes = (dict(layer.rope.scaling) for layer in config.layers if layer.rope)
        kinds = {rope.get("rope_type", rope.get("type")) for rope in ropes} - {None, "default"}
        scaling = f"scaled: {', '.join(sorted(kinds))}" if kinds else "not scaled"
        warnings.warn(
            f"prompt and answer may grow to {reached} tokens, more than the {longest} that this "
            f"model was made for (max_position_embeddings; its RoPE is {scaling}).",
            stacklevel=4,
        )


def _check_row(index: int, row: list[int], vocabulary: int, options: Options) -> None:
    if not row:
        raise ValueError(f"prompt {index} has no tokens. Give it at least one character.")
    if not all(0 <= token < vocabulary for token in row):
        raise ValueError(
            f"prompt {index} should hold token ids in [0, {vocabulary}), "
            f"but got {min(row)} .. {max(row)}."
        )
    if options.max_length is not None:
        pages = math.ceil(options.max_length / options.page_size)
        if len(row) > pages * options.page_size:
            raise ValueError(
                f"prompt {index} has {len(row)} tokens, but the cache holds "
                f"{pages * options.page_size} for each row (`max_length` {options.max_length}). "
                "Shorten the prompt or raise `max_length`."
            )
