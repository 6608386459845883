"""Text to tokens and back: a thin wrapper of a `tokenizers.Tokenizer` and a chat template."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

REPLACEMENT = "\ufffd"  # what the decoder shows for the first bytes of an unfinished character


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Encodes, decodes and renders chats.

    Attributes:
      backend: the `tokenizers.Tokenizer`.
      bos_id: the token a text starts with, if any.
      eos_ids: the tokens that end an answer.
      chat_template: Jinja source, or None.
      special_tokens: what the template may name, e.g. {"bos_token": "<s>"}.
    """

    backend: Any
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """1 + the largest id of a token, without those that were added to the vocabulary."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=False).values(), default=-1)

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of the tokens that were added to the vocabulary."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A rendered chat template brings its own special tokens.

        Raises:
          TypeError: `text` is no str.
          ValueError: it holds surrogates, as of bytes that were no text, or what the vocabulary
            has no token for.
        """
        if not isinstance(text, str):
            raise TypeError(f"`text` should be a str, but got {text!r:.80}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text should be Unicode, but character {error.start} is none: "
                f"{text[error.start]!r}."
            ) from error
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"the tokenizer cannot encode this text: {error}.") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Renders messages `{"role": ..., "content": ...}` as the model was trained to see them.

        The template comes from the checkpoint, so it runs in Jinja's sandbox.

        Raises:
          ValueError: the tokenizer has no chat template, or the template refuses the messages.
          TypeError: `messages` is of another kind; a template would render anything.
        """
        check_messages(messages)
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template, so messages cannot be rendered. "
                "Pass the prompt as plain text (`--raw` on the command line)."
            )
        environment = _environment()
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template can cause any
            raise ValueError(f"the chat template could not be rendered: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the model answers."""
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)

    def stream_decoder(self) -> StreamDecoder:
        """A decoder to be fed one token at a time."""
        return StreamDecoder(self)


def check_messages(messages: Any) -> None:
    """Raises TypeError for what are no messages of a chat, which a template would still render."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"`messages` should be a list of messages, but got {messages!r:.80}.")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(
                "each of `messages` should be a dict of `role` and `content`, but one is "
                f"{message!r:.80}."
            )
        if not isinstance(message.get("content"), str | None):
            raise TypeError(f"`content` should be text, but is {message['content']!r:.80}.")


def _environment():
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks for training what the model said; here it is what is in it."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser):
            """The nodes between the tags."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    # Jinja's own escapes what HTML and JavaScript would read otherwise; a model reads text.
    environment.filters["tojson"] = _to_json
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def raise_exception(message: str):
        from jinja2 import TemplateError

        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


class StreamDecoder:
    """Turns tokens into text as they come; the pieces join to what `decode` gives for all.

    A character can be spread over several tokens: its first bytes are held back until it is whole.
    Only the tokens since the last whole character, and those of the piece before (decoders may look
    at the left neighbour), are decoded again, so that a long answer stays linear.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # start of the piece before
        self._shown = 0  # tokens whose text has been returned

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps empty."""
        self._ids.append(token)
        text = self._pending()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """What was held back, at the end."""
        text = self._pending()
        self._context = self._shown = len(self._ids)
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(before) :]
