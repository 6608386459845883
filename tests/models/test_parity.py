"""Logits of every family equal those of Hugging Face transformers (scripts/parity_fixtures.py)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from directkv_jax.models import families
from directkv_jax.models.checkpoint import Checkpoint, build
from directkv_jax.models.hf import open_tensors

FOLDERS = sorted((Path(__file__).parents[1] / "data" / "parity").iterdir())
PROMPTS = np.array([20, 13], np.int32)  # the same text, read to here at once
STEPS = 20


def open_model(folder: Path, dtype):
    values = json.loads((folder / "config.json").read_text())
    family = families.find(values)
    tensors, problems = open_tensors(folder)
    checkpoint = Checkpoint(
        folder, family.config(values), tensors, None, layout=family.names, problems=tuple(problems)
    )
    return build(checkpoint, dtype, progress=False)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
def read(graphdef, params, tokens, cache, lengths):
    return nnx.merge(graphdef, params).prefill(tokens, cache, lengths)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
def step(graphdef, params, tokens, cache):
    return nnx.merge(graphdef, params)(tokens, cache)


def logits_of(folder: Path, dtype, tokens):
    """float32 [STEPS + 1, 2, vocabulary]: after the prompts, and after each step."""
    model = open_model(folder, dtype)
    graphdef, params = nnx.split(model)
    cache = model.create_cache(2, 48, page_size=16, placement="host")
    prompts = np.zeros((2, PROMPTS.max()), np.int32)
    for row, length in enumerate(PROMPTS):
        prompts[row, :length] = tokens[:length]
    with jax.default_matmul_precision("highest"):
        logits, cache = read(graphdef, params, prompts, cache, PROMPTS)
        all_logits = [logits]
        for i in range(STEPS):
            logits, cache = step(graphdef, params, tokens[PROMPTS + i][:, None], cache)
            all_logits.append(logits[:, 0])
    assert cache.lengths.tolist() == (PROMPTS + STEPS).tolist()
    return np.asarray(jnp.stack(all_logits))


def expected(folder: Path):
    held = load_file(folder / "expected.safetensors")
    at = PROMPTS[None] - 1 + np.arange(STEPS + 1)[:, None]
    return held["tokens"], held["logits"][at], held["logits_bfloat16"][at]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_float32_equals_transformers(folder):
    tokens, exact, _ = expected(folder)
    got = logits_of(folder, "float32", tokens)
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_bfloat16_errs_no_more_than_transformers(folder):
    held = load_file(folder / "expected.safetensors")
    tokens, exact, rounded = (held[name] for name in ("tokens", "logits", "logits_bfloat16"))
    graphdef, params = nnx.split(model := open_model(folder, "bfloat16"))
    cache, got = model.create_cache(1, 48, page_size=16, placement="host"), []
    for token in tokens:  # a single program to compile
        logits, cache = step(graphdef, params, token[None, None], cache)
        got.append(logits[0, 0])
    error = np.sqrt(np.mean((np.stack(got) - exact) ** 2))
    assert error <= 1.5 * np.sqrt(np.mean((rounded - exact) ** 2))
