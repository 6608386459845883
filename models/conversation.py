"""Chats: messages rendered by the model's template, answered one after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from directkv_jax.models.generate import complete
from directkv_jax.models.result import Generation, Piece
from directkv_jax.models.session import Session
from directkv_jax.models.tokenizer import Tokenizer, check_messages
from directkv_jax.models.transformer import Transformer

Message = Mapping[str, str]
_MESSAGES = "messages"  # of the metadata of a saved session


def chat(
    model: Transformer, tokenizer: Tokenizer, messages: str | Sequence[Message], **options: Any
) -> str:
    """The answer to a chat.

    Example::

      chat(model, tokenizer, "What is the capital of France?")

    Args:
      model: from `load`.
      tokenizer: from `load`.
      messages: `{"role": ..., "content": ...}` each, or the text of one message of the user.
      **options: as `Options`.

    Raises:
      ValueError: the tokenizer has no chat template, or the template refuses the messages.
      TypeError, NotImplementedError, MemoryError: as `stream`.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return complete(model, tokenizer, [tokenizer.encode_chat(messages)], **options).texts[0]


class Chat:
    """A chat of several turns, over the cache of a session.

    Example::

      with Session(model, tokenizer, max_length=8192) as session:
          chat = Chat(session, system="Answer in one sentence.")
          for piece in chat.stream("What is a cache?"):
              ...

    Args:
      session: whose cache it uses.
      system: what the model is told first; None leaves it to the template.
      messages: those so far, as of a saved chat; then without `system`.

    Attributes:
      messages: `{"role": ..., "content": ...}` each, answers included.
    """

    def __init__(
        self, session: Session, system: str | None = None, messages: Sequence[Message] = ()
    ):
        self.session = session
        self.messages: list[Message] = list(messages)
        if system is not None:
            self.messages.insert(0, {"role": "system", "content": system})

    def stream(self, text: str, **options: Any) -> Generator[Piece | Generation, None, None]:
        """Says something, and gives the answer as it comes; as `Session.stream`.

        What was said and the answer, as far as it came, are then among `messages`; neither is if
        the answer could not begin.
        """
        said: Message = {"role": "user", "content": text}
        ids = self.session.tokenizer.encode_chat([*self.messages, said])
        return self._answer(said, self.session.stream(ids, **options))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the messages and the cache into a file.

        Raises:
          ValueError, OSError: as `Session.save`.
        """
        self.session.save(path, {_MESSAGES: json.dumps(self.messages)})

    @classmethod
    def load(
        cls, path: str | os.PathLike, model: Transformer, tokenizer: Tokenizer, **options: Any
    ) -> Chat:
        """A saved chat, to go on with; arguments and errors as `Session.load`.

        Raises:
          ValueError: the file holds no chat, or a damaged one.
        """
        session = Session.load(path, model, tokenizer, **options)
        try:
            return cls(session, messages=_saved_messages(path, session.metadata))
        except ValueError:
            session.close()
            raise

    def _answer(self, said: Message, stream: Generator) -> Generator:
        answer, began = "", False
        try:
            for item in stream:
                began = True
                answer += item.text if isinstance(item, Piece) else ""
                yield item
        finally:
            stream.close()
            if began:
                self.messages += [said, {"role": "assistant", "content": answer}]


def _saved_messages(path: str | os.PathLike, metadata: Mapping[str, str]) -> list[Message]:
    if _MESSAGES not in metadata:
        raise ValueError(f"{path} holds a session, but no chat.")
    try:
        messages = json.loads(metadata[_MESSAGES])
        check_messages(messages)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: no messages of a chat: {error}") from error
    return messages
