"""The command line: `directkv info`, `generate`, `chat`, `plan` and `bench`.

Flax, tokenizers and the models are imported by the command that needs them, not here.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from directkv_jax.cli.bench import add_commands as add_bench_commands
from directkv_jax.cli.options import add_chat_arguments, add_generate_arguments, size
from directkv_jax.cli.plan import add_arguments as add_plan_arguments
from directkv_jax.cli.plan import run as run_plan

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# What a user can cause. Anything else is a bug and shows its traceback.
_EXPECTED = (
    ValueError,
    TypeError,
    NotImplementedError,
    ImportError,
    MemoryError,
    OSError,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"directkv: error: {message} (see `{self.prog} --help`)\n")


def run_as_program() -> NoReturn:
    """`main` as a process. After Ctrl-C it ends at once.

    What the device still computes is not waited for: Python would, for as long as a layer of a long
    prompt takes, and can crash when that comes to its end.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as we run
    # What a terminal cannot show is a question mark there, not the end of an answer.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    status = main()
    if status == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `directkv`. Returns the exit status: 0, 2 for bad input, 130 for Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    plain, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("\ndirectkv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, e.g. `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _EXPECTED as error:
        if "DIRECTKV_TRACEBACK" in os.environ:
            raise
        return _failed(str(error) or type(error).__name__)
    except (RuntimeError, AssertionError):
        if (problem := _backend_problem()) is None:
            raise
        return _failed(problem)
    finally:
        warnings.formatwarning = plain


def _failed(text: str) -> int:
    print(f"directkv: error: {' '.join(text.split())}", file=sys.stderr)
    return BAD_INPUT


def _backend_problem() -> str | None:
    """Why JAX has no device at all, if so."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        wanted = os.environ.get("JAX_PLATFORMS", "")
        why = str(error) or "perhaps JAX's plugin for it is not installed"
        return f"JAX has no device. JAX_PLATFORMS is {wanted!r}; {why}."
    return None


def _one_line(message, *_, **__) -> str:
    return f"directkv: warning: {message}\n"


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands; each sets `run`, a function of the parsed arguments."""
    parser = _Parser(
        prog="directkv", description="Decoding with a KV cache that stays in host memory."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    info = commands.add_parser("info", help="what this machine and installation can do")
    info.add_argument("--json", action="store_true", help="one JSON object instead of text")
    info.set_defaults(run=_run_info)
    generate = commands.add_parser("generate", help="let a model continue a prompt, as a stream")
    add_generate_arguments(generate)
    generate.set_defaults(run=_run_generate)
    chat = commands.add_parser("chat", help="talk to a model; the cache is kept from turn to turn")
    add_chat_arguments(chat)
    chat.set_defaults(run=_run_chat)
    plan = commands.add_parser("plan", help="whether a context fits, and how long a step takes")
    add_plan_arguments(plan, size)
    plan.set_defaults(run=run_plan)
    add_bench_commands(commands.add_parser("bench", help="measure, and draw what was measured"))
    return parser


def _run_info(arguments: argparse.Namespace) -> int:
    from directkv_jax.cli.info import run

    return run(arguments)


def _run_generate(arguments: argparse.Namespace) -> int:
    from directkv_jax.cli.generate import run

    return run(arguments)


def _run_chat(arguments: argparse.Namespace) -> int:
    from directkv_jax.cli.chat import run

    return run(arguments)
