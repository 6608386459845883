"""A donated cache stays where it is through every way of running a step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import directkv_jax.linen
import directkv_jax.nnx


def nnx_model():
    model = directkv_jax.nnx.MultiHeadAttention(4, 256, rngs=nnx.Rngs(0))
    return nnx.view(model, decode=True, batch_size=2, max_length=64)


def linen_model(tokens, length=64):
    model = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, decode=True)
    variables = model.init(jax.random.key(0), tokens(length))
    return model, variables["params"], variables["cache"]


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_nnx_split_step(jit, tokens, nnx_step, address):
    step, cache, rest = nnx_step(nnx_model(), jit)
    start = address(cache["kv_cache"].get_value())
    for n in range(1, 4):
        old = cache["kv_cache"].get_value()
        cache, _ = step(cache, rest, tokens(1))
        held = cache["kv_cache"].get_value()
        assert old.pages.is_deleted()
        assert address(held) == start
        assert held.lengths.tolist() == [n, n]


def test_nnx_jit_of_the_whole_model(tokens, address):
    model = nnx_model()
    start = address(model.kv_cache.get_value())
    step = nnx.jit(lambda model, x: model(x), donate_argnums=0)
    for _ in range(3):
        step(model, tokens(1))
        assert address(model.kv_cache.get_value()) == start


def test_eager_nnx(tokens, address):
    model = nnx_model()
    start = address(model.kv_cache.get_value())
    model(tokens(1))
    assert address(model.kv_cache.get_value()) == start


def test_linen_apply(tokens, linen_step, address):
    model, params, cache = linen_model(tokens)
    start, step = address(cache["kv_cache"]), linen_step(model)
    for n in range(1, 4):
        old = cache["kv_cache"]
        cache, _ = step(cache, params, tokens(1))
        assert old.pages.is_deleted()
        assert address(cache["kv_cache"]) == start
        assert cache["kv_cache"].lengths.tolist() == [n, n]


def test_linen_while_loop(tokens, address):
    model, params, cache = linen_model(tokens)
    start = address(cache["kv_cache"])

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, params, x, steps):
        def body(carry):
            i, cache, x = carry
            y, state = model.apply({"params": params, "cache": cache}, x, mutable=["cache"])
            return i + 1, state["cache"], y

        _, cache, x = jax.lax.while_loop(lambda carry: carry[0] < steps, body, (0, cache, x))
        return cache, x

    cache, _ = run(cache, params, tokens(1), 5)
    cache, _ = run(cache, params, tokens(1), 2)
    assert address(cache["kv_cache"]) == start
    assert cache["kv_cache"].lengths.tolist() == [7, 7]


def test_nnx_scan_over_steps(tokens, address):
    graphdef, cache, rest = nnx.split(nnx_model(), nnx.Cache, ...)
    start = address(cache["kv_cache"].get_value())

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, rest, x):
        def body(cache, x):
            model = nnx.merge(graphdef, cache, rest)
            y = model(x)
            return nnx.state(model, nnx.Cache), y

        return jax.lax.scan(body, cache, x)

    cache, y = run(cache, rest, jnp.moveaxis(tokens(6), 1, 0)[:, :, None])
    held = cache["kv_cache"].get_value()
    assert y.shape == (6, 2, 1, 256)
    assert address(held) == start
    assert held.lengths.tolist() == [6, 6]


def test_a_donated_cache_cannot_be_used_twice(tokens, nnx_step, linen_step):
    step, cache, rest = nnx_step(nnx_model())
    step(cache, rest, tokens(1))
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        step(cache, rest, tokens(1))
    model, params, cache = linen_model(tokens)
    linen_step(model)(cache, params, tokens(1))
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        linen_step(model)(cache, params, tokens(1))


def test_an_undonated_cache_is_refused(native, tokens):
    # A size of its own: where a cache of the same size was freed, a copy could pass for it.
    model, params, cache = linen_model(tokens, length=832)
    model = model.clone(implementation=native)
    step = jax.jit(lambda variables, x: model.apply(variables, x, mutable=["cache"]))
    with pytest.raises(Exception, match="the cache was not donated"):
        jax.block_until_ready(step({"params": params, "cache": cache}, tokens(1)))
    assert cache["kv_cache"].lengths.tolist() == [0, 0]
