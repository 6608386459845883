"""A text that goes on: its tokens stay in the cache, and are not read again."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from directkv_jax.models import saving
from directkv_jax.models.kinds import COUNT, INDEX
from directkv_jax.models.prompts import Prompt, encode
from directkv_jax.models.request import Options, prepare
from directkv_jax.models.result import Generation, Piece
from directkv_jax.models.running import Run
from directkv_jax.models.tokenizer import Tokenizer
from directkv_jax.models.transformer import Transformer

_CLOSED = "This session is closed. Make a new one."
# Of the cache, and so not of one call.
_OF_THE_SESSION = ("max_length", "placement", "page_size")


class Session:
    """One row in a cache that is kept from call to call.

    A prompt is given whole each time, with all that came before it: what of it begins as the
    cache does is not read again, what differs is taken back first. So a conversation costs only
    what is new of it, and a question can be asked again with another wording.

    Example::

      with Session(model, tokenizer, max_length=8192) as session:
          for piece in session.stream(document + question, max_new_tokens=64):
              ...
          for piece in session.stream(document + another_question):
              ...

    Args:
      model: from `load`.
      tokenizer: from `load`.
      max_length: tokens, of prompt and answer, that the cache holds.
      placement: where keys and values live, "host" or "device".
      page_size: tokens per page of the cache.
      rollback: tokens that layers of a sliding window can take back; beyond it a prompt is read
        anew. At least `speculate`.

    Attributes:
      cache: a `ModelCache` of one row.
      tokens: that it holds.
      metadata: texts that were saved with it.

    Raises:
      ValueError, TypeError: a size is wrong.
      MemoryError: the memory for the cache cannot be had.
    """

    _closed = _reading = False
    _calls = 0

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, *, max_length: int,
        placement: str = "host", page_size: int = 64, rollback: int = 64,
    ):  # fmt: skip
        sizes = Options(max_length=max_length, page_size=page_size, placement=placement)
        COUNT.check("max_length", sizes.max_length)  # None is no size here
        rollback = int(rollback) if isinstance(rollback, np.integer) else rollback
        self._rollback = INDEX.check("rollback", rollback)
        self.model, self.tokenizer = model, tokenizer
        self.cache = model.create_cache(
            1, sizes.max_length, page_size=sizes.page_size, placement=placement, rollback=rollback
        )
        self.tokens: tuple[int, ...] = ()  # in the cache
        self.metadata: dict[str, str] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Frees the cache."""
        self._closed = True
        if not self.cache.is_deleted():
            self.cache.delete()
        self.tokens = ()

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Piece | Generation, None, None]:
        """Continues a prompt, as `models.stream` does.

        The answer is in the cache afterwards, also of a stream that was closed before its end.

        Args:
          prompt: a text or token ids, from its beginning on.
          **options: as `Options`, but for those of the cache.

        Raises:
          TypeError, ValueError, NotImplementedError: as `models.stream`, or the session is closed,
            or another of its streams open.
        """
        if given := [name for name in _OF_THE_SESSION if name in options]:
            raise ValueError(f"`{given[0]}` is an option of the Session, not of one call.")
        self._check_open()
        part = self.cache.parts[0]
        known = Options(max_length=self.cache.max_length, page_size=part.page_size, **options)
        if known.speculate > self._rollback:
            raise ValueError(
                f"`speculate` should be at most the `rollback` of the session, {self._rollback}, "
                f"but got {known.speculate}."
            )
        ids = encode(self.tokenizer, prompt)
        cached = self._common(ids)
        request = prepare(self.model, self.tokenizer, [ids], known, cached)  # raises first
        if not self._rewind(cached):
            request = prepare(self.model, self.tokenizer, [ids], known)
        self._calls += 1
        return self._run(Run(self.model, self.tokenizer, request, self.cache), ids, self._calls)

    def complete(self, prompt: Prompt, **options: Any) -> Generation:
        """`stream`, and the `Generation` at its end."""
        *_, generation = self.stream(prompt, **options)
        assert isinstance(generation, Generation)
        return generation

    def _run(
        self, run: Run, ids: list[int], call: int
    ) -> Generator[Piece | Generation, None, None]:
        if self._closed:
            raise ValueError(_CLOSED)
        if call != self._calls:
            raise ValueError("A later call of its session has overtaken this stream.")
        self._reading = True
        try:
            yield from run
        finally:
            self.cache, self.tokens, self._reading = run.cache, (), False
            if self._closed:
                run.free()
            elif not self.cache.is_deleted():
                length = int(self.cache.lengths[0])
                # Of an answer that a text stopped, the cache may hold more; it is taken back later.
                self.tokens = (*ids, *run.collector.tokens(0))[:length]

    def _check_open(self) -> None:
        """Raises unless the cache is at hand; one that is lost is made anew, empty.

        It was donated to a call, and an error or Ctrl-C came before the result had a name.
        """
        if self._closed:
            raise ValueError(_CLOSED)
        if self._reading:
            raise ValueError("A stream of this session is open. Read it to its end, or close it.")
        if self.cache.is_deleted():
            self.cache, self.tokens = self.cache.empty_like(), ()

    def _common(self, ids: Sequence[int]) -> int:
        """How many tokens `ids` begins with that the cache holds.

        One at least is left to read: what follows the last one is asked for.
        """
        if bool(self.cache.overflowed[0]):
            return 0
        pairs = zip(self.tokens, ids[:-1], strict=False)
        return next(
            (index for index, (ours, theirs) in enumerate(pairs) if ours != theirs),
            min(len(self.tokens), max(0, len(ids) - 1)),
        )

    def _rewind(self, length: int) -> bool:
        """Takes back what is beyond `length`; else, further back than windows reach, everything."""
        if length:
            try:
                self.cache, self.tokens = self.cache.truncate(length), self.tokens[:length]
                return True
            except ValueError:
                pass
        self.cache, self.tokens = self.cache.reset(), ()
        return length == 0

    def save(self, path: str | os.PathLike, metadata: Mapping[str, str] | None = None) -> None:
        """Writes the tokens, and their keys and values, into a file.

        After an error or Ctrl-C that lost the cache these are none, until something is read again.

        Args:
          path: of the file; replaced if it exists.
          metadata: texts to keep beside them; `metadata` of what `load` returns.

        Raises:
          TypeError: metadata that are no texts.
          ValueError: the session is closed, or one of its streams is open.
          OSError: the file cannot be written.
        """
        self._check_open()
        saving.save(path, self.cache, self.model, self.tokens, metadata or {})

    @classmethod
    def load(
        cls, path: str | os.PathLike, model: Transformer, tokenizer: Tokenizer, *,
        max_length: int | None = None, placement: str | None = None,
    ) -> Session:  # fmt: skip
        """A saved session, to go on with.

        Args:
          path: of the file.
          model: that the session was of.
          tokenizer: from `models.load`.
          max_length: tokens that the cache holds; None: as many as before.
          placement: "host" or "device"; None: where it was.

        Raises:
          FileNotFoundError, ValueError: the file is absent, damaged, or of another model.
          MemoryError: the memory for the cache cannot be had.
        """
        session = cls.__new__(cls)
        session.model, session.tokenizer = model, tokenizer
        session.cache, session.tokens, session.metadata = saving.load(
            path, model, max_length=max_length, placement=placement
        )
        windows = [part.rollback for part in session.cache.parts if part.window is not None]
        session._rollback = min(windows, default=1 << 30)
        return session
