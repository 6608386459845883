"""Prompts read in chunks over a host cache, with the kernels for many tokens and for few."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="the model is a Flax model")
from flax import nnx

from directkv_jax.models.config import LayerConfig, ModelConfig, RopeConfig
from directkv_jax.models.reading import PromptReader
from directkv_jax.models.sizes import chunk_sizes
from directkv_jax.models.transformer import Transformer

CONFIG = ModelConfig("llama", 64, 128, (LayerConfig(8, 2, 64, 192, RopeConfig()),) * 2)
LENGTHS = np.array([701, 3, 130], np.int32)
WHOLE = 1024


def read(dtype, chunk, placement="host"):
    """Logits after each prompt, of a model whose weights do not depend on `dtype`."""
    model = Transformer(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    state = jax.tree.map(lambda x: x.astype(dtype), nnx.state(model))
    model = nnx.merge(nnx.graphdef(Transformer(CONFIG, dtype=dtype, rngs=nnx.Rngs(0))), state)
    chunks = chunk_sizes(int(LENGTHS.max()), chunk)
    tokens = np.zeros((len(LENGTHS), sum(chunks)), np.int32)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = np.random.default_rng(row).integers(0, 64, length)
    cache = model.create_cache(len(LENGTHS), 768, placement=placement)
    precision = "highest" if dtype == jnp.float32 else None  # no TF32
    with jax.default_matmul_precision(precision):
        last, cache = PromptReader(model).read(
            jnp.asarray(tokens), jnp.asarray(LENGTHS), chunks, cache
        )
        logits = model.logits(last)
    assert cache.lengths.tolist() == LENGTHS.tolist()
    assert not cache.overflowed.any()
    return np.asarray(logits)


@functools.cache
def exact():
    return read(jnp.float32, WHOLE)


@pytest.mark.parametrize("chunk", [1, 7, 64, 500])
def test_float32(chunk):
    scale = np.abs(exact()).max()
    np.testing.assert_allclose(read(jnp.float32, chunk), exact(), rtol=0, atol=2e-4 * scale)


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 500])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_errs_no_more_in_chunks(dtype, chunk, placement):
    at_once = np.abs(read(jnp.dtype(dtype), WHOLE) - exact()).max()
    assert np.abs(read(jnp.dtype(dtype), chunk, placement) - exact()).max() < 3 * at_once
