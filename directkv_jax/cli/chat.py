"""`directkv chat`: a conversation whose cache is kept from turn to turn.

A turn is a line of standard input. Lines that begin with a slash and a word are commands; /help
lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from directkv_jax.cli.generate import (
    PrefillBar,
    default_model,
    import_models,
    precision_of,
    report,
    show,
)
from directkv_jax.cli.options import of_generation

DEFAULT_MAX_LENGTH = 8192
_COMMAND = re.compile(r"/\w*(\s|$)")  # a path, as /etc/hosts, is none
HELP = """/save FILE  keep the chat, with its cache, for --resume
/new        forget what was said
/help       this text
A message that begins so is said after a space.
Ctrl-C ends an answer, Ctrl-D the chat."""


def run(arguments: argparse.Namespace) -> int:
    """Answers line by line until the input ends."""
    models = import_models()
    options = of_generation(models, arguments)
    for name in ("system", "page_size"):
        if arguments.resume and getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} belongs to the beginning of a chat, not to one with "
                "--resume."
            )
    model, tokenizer = models.load(arguments.model or default_model(), arguments.dtype)
    chat = _open(models, model, tokenizer, arguments)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # the line can be edited, and earlier ones recalled
        print("/help lists the commands.", file=sys.stderr)
    with chat.session, precision_of(arguments.dtype):
        for line in _lines(interactive):
            try:
                if _COMMAND.match(line):
                    _command(models, chat, line, arguments)
                else:
                    _turn(models, chat, line, options, arguments, model)
            except Exception as error:  # whatever it is, the chat is not lost with it
                if not interactive:
                    raise
                print(f"directkv: {error}", file=sys.stderr)
    return 0


def _open(models, model, tokenizer, arguments: argparse.Namespace):
    if arguments.resume:
        return models.Chat.load(
            arguments.resume, model, tokenizer, max_length=arguments.max_length,
            placement=arguments.kv,
        )  # fmt: skip
    given = {
        "max_length": arguments.max_length, "placement": arguments.kv,
        "page_size": arguments.page_size,
    }  # fmt: skip
    options = {
        "max_length": min(model.config.max_position_embeddings, DEFAULT_MAX_LENGTH),
        **{name: value for name, value in given.items() if value is not None},
    }
    session = models.Session(model, tokenizer, **options, rollback=max(64, arguments.speculate))
    return models.Chat(session, arguments.system)


def _lines(interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if interactive else input()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            problem = f"the standard input should be {sys.stdin.encoding} text: {error}"
            if not interactive:
                raise ValueError(problem) from error
            print(f"directkv: {problem}", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\nCtrl-D ends the chat.", file=sys.stderr)
            continue
        if line.strip():
            yield line


def _turn(models, chat, line: str, options: dict[str, Any], arguments, model) -> None:
    with PrefillBar() as bar:
        stream = chat.stream(line, **options, on_progress=bar.update)
        try:
            result = show(models, stream)
        except KeyboardInterrupt:  # of the answer; what came of it is remembered
            stream.close()
            print(flush=True)
            return
    report(result, arguments, model)


def _command(models, chat, line: str, arguments: argparse.Namespace) -> None:
    name, *rest = line.strip().split(maxsplit=1)
    if name == "/save":
        if not rest:
            raise ValueError("/save needs the name of a file.")
        chat.save(rest[0])
        print(f"saved to {rest[0]}", file=sys.stderr)
    elif name == "/new":
        chat.messages[:] = [each for each in chat.messages[:1] if each["role"] == "system"]
    elif name == "/help":
        print(HELP, file=sys.stderr)
    else:
        raise ValueError(
            f"there is no command {name}. /help lists them; a message that begins so is said after "
            "a space."
        )
