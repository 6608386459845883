"""Shared by the drop-in tests. No `__init__.py` here: it would shadow the package flax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import directkv_jax

FEATURES = 256  # 4 heads of 64: what the CUDA kernels serve too
BATCH = 2


@pytest.fixture(autouse=True)
def _exact_matmuls():
    """On a GPU the projections would otherwise run in TF32, and round by their shapes."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def tokens():
    """tokens(T, batch=(2,)) -> float32 `[batch..., T, D]`."""

    def make(count: int, batch=(BATCH,), seed: int = 7):
        return jax.random.normal(jax.random.key(seed), (*batch, count, FEATURES))

    return make


@pytest.fixture
def address():
    """address(cache) -> where its pages lie."""
    return lambda cache: cache.pages.unsafe_buffer_pointer()


@pytest.fixture
def nnx_step():
    """nnx_step(model) -> (step, cache, rest): one decode step with the cache alone donated."""

    def make(model, jit=jax.jit, **options):
        graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)

        @functools.partial(jit, donate_argnums=0)
        def step(cache, rest, x, *lengths):
            model = nnx.merge(graphdef, cache, rest)
            named = dict(zip(("query_seq_lengths",), lengths, strict=False))
            y = model(x, **named, **options)
            return nnx.state(model, nnx.Cache), y

        return step, cache, rest

    return make


@pytest.fixture
def linen_step():
    """linen_step(model) -> step(cache, params, x): one decode step with the cache alone donated."""

    def make(model):
        @functools.partial(jax.jit, donate_argnums=0)
        def step(cache, params, x, *lengths):
            named = dict(zip(("query_seq_lengths",), lengths, strict=False))
            variables = {"params": params, "cache": cache}
            y, state = model.apply(variables, x, mutable=["cache"], **named)
            return state["cache"], y

        return step

    return make


@pytest.fixture
def stacked_cache():
    """stacked_cache(model_length, L) -> one cache of L layers with 4 KV heads of 64."""

    def make(num_layers: int, num_kv_heads: int = 4, max_length: int = 64):
        return directkv_jax.KVCache.create(
            BATCH, max_length, num_kv_heads=num_kv_heads, head_dim=FEATURES // 4,
            num_layers=num_layers, dtype=jnp.float32, page_size=16,
        )  # fmt: skip

    return make
