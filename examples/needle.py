"""A question about one sentence of a long document, read through a cache in host memory.

    python examples/needle.py                       # about 6000 tokens, SmolLM2
    python examples/needle.py --sentences 4000 --model Qwen2.5-7B-Instruct

Writes a document of made-up sentences with the answer somewhere among them, and gives it to
`directkv generate --prompt-file`. The exit status is 1 if the answer is wrong.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

NEEDLE = 'The secret password of the lighthouse keeper is "marigold {}".'
QUESTION = "What is the secret password of the lighthouse keeper?"
NAMES = [
    "Anna",
    "Boris",
    "Clara",
    "Dmitri",
    "Elena",
    "Felix",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Karin",
    "Leo",
    "Maria",
    "Nils",
]
PLACES = (
    "the harbour", "the old mill", "the market square", "the railway station", "the library",
    "the bakery", "the town hall", "the botanical garden", "the river bank",
)  # fmt: skip
THINGS = (
    "a letter", "a basket of apples", "a broken clock", "a blue umbrella", "two tickets", "a map",
    "a loaf of bread", "a violin", "an empty bottle", "a box of nails",
)  # fmt: skip
VERBS = [
    "carried",
    "found",
    "forgot",
    "sold",
    "repaired",
    "painted",
    "borrowed",
    "hid",
    "described",
    "lost",
]


def document(sentences: int, depth: float, code: int, seed: int = 3) -> str:
    """Paragraphs of so many sentences, with the needle after a part `depth` of them."""
    draw = random.Random(seed)
    lines = [sentence(draw) for _ in range(sentences)]
    lines.insert(int(depth * sentences), NEEDLE.format(code))
    return "\n\n".join(" ".join(lines[i : i + 8]) for i in range(0, len(lines), 8)) + "\n"


def sentence(draw: random.Random) -> str:
    """One of four kinds."""
    one, two = draw.sample(NAMES, 2)
    place, thing = draw.choice(PLACES), draw.choice(THINGS)
    return draw.choice(
        (
            f"{one} {draw.choice(VERBS)} {thing} near {place}.",
            f"In the evening {one} and {two} walked from {place} to {draw.choice(PLACES)}.",
            f"{one} told {two} about {thing}, and they talked about it until midnight.",
            f"It rained, so {one} stayed at {place} with {thing}.",
        )
    )


def main() -> int:
    """Asks once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=395)
    parser.add_argument("--depth", type=float, default=0.38, help="where the answer stands, 0 to 1")
    parser.add_argument("--code", type=int, default=4817, help="part of the answer")
    parser.add_argument("--model", help="as of directkv generate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.txt"
        file.write_text(document(options.sentences, options.depth, options.code))
        command = [sys.executable, "-m", "directkv_jax", "generate", "--prompt-file", str(file)]
        command += ["--prompt", QUESTION, "--max-new-tokens", "24"]
        command += ["--model", options.model] if options.model else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    found = done.returncode == 0 and f"marigold {options.code}" in done.stdout
    print("found" if found else "not found")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
