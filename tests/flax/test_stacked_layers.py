"""A stack of layers shares one cache: carry of the scan, with the layer index as its xs."""

from __future__ import annotations

import functools
import operator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import directkv_jax.linen
import directkv_jax.nnx

pytestmark = pytest.mark.usefixtures("strict_numerics")
L = 2
# Float32 rounding of sums of some hundred products, outputs up to 6.
TOLERANCE = {"rtol": 1e-5, "atol": 3e-5}


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(256, rngs=rngs)
        self.attention = directkv_jax.nnx.MultiHeadAttention(
            4, 256, num_kv_heads=2, decode=False, rngs=rngs
        )

    def __call__(self, x, cache, layer, **options):
        y, cache = self.attention(self.norm(x), cache=cache, layer=layer, **options)
        return x + y, cache


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, carry, layer):
        x, cache = carry
        attention = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, num_kv_heads=2)
        y, cache = attention(nn.LayerNorm()(x), cache=cache, layer=layer)
        return (x + y, cache), None


class LinenStack(nn.Module):
    check: bool = False

    @nn.compact
    def __call__(self, x, cache):
        layers = nn.scan(
            LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=L,
            check_constancy_invariants=self.check,
        )  # fmt: skip
        (x, cache), _ = layers(name="layers")((x, cache), jnp.arange(L))
        return x, cache.advance(x.shape[1])


def nnx_blocks():
    @nnx.split_rngs(splits=L)
    @nnx.vmap
    def make(rngs):
        return NnxBlock(rngs)

    return make(nnx.Rngs(0))


@nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
def nnx_layers(carry, block, layer):
    return block(*carry, layer)


def run(step, params, cache, x, address):
    """Steps of 4, 1 and 1 tokens; the buffer must stay, the outputs are joined."""
    start, out = address(cache), []
    for part in jnp.split(x, [4, 5], axis=1):
        y, cache = step(cache, params, part)
        assert address(cache) == start
        out.append(y)
    assert cache.lengths.tolist() == [6, 6]
    return jnp.concatenate(out, axis=1), cache


def assert_same(stacked, unrolled):
    """Outputs and stored keys and values of every layer."""
    np.testing.assert_allclose(stacked[0], unrolled[0], **TOLERANCE)
    for layer in range(L):
        pairs = zip(
            stacked[1].gather(layer, 1, 0, 6), unrolled[1].gather(layer, 1, 0, 6), strict=True
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, **TOLERANCE)


def test_nnx_scan_equals_the_unrolled_layers(tokens, stacked_cache, address):
    graphdef, params = nnx.split(nnx_blocks())

    @functools.partial(jax.jit, donate_argnums=0)
    def scanned(cache, params, x):
        x, cache = nnx_layers((x, cache), nnx.merge(graphdef, params), jnp.arange(L))
        return x, cache.advance(x.shape[1])

    @functools.partial(jax.jit, donate_argnums=0)
    def unrolled(cache, params, x):
        for layer in range(L):
            block = nnx.merge(graphdef, jax.tree.map(operator.itemgetter(layer), params))
            x, cache = block(x, cache, layer)
        return x, cache.advance(x.shape[1])

    results = (
        run(step, params, stacked_cache(L, num_kv_heads=2), tokens(6), address)
        for step in (scanned, unrolled)
    )
    assert_same(*results)


def test_nn_scan_equals_the_unrolled_layers(tokens, stacked_cache, address):
    cache = stacked_cache(L, num_kv_heads=2)
    params = LinenStack().init(jax.random.key(0), tokens(1), cache)["params"]
    assert not cache.pages.is_deleted()  # init leaves the cache alone
    assert cache.lengths.tolist() == [0, 0]

    @functools.partial(jax.jit, donate_argnums=0)
    def scanned(cache, params, x):
        return LinenStack().apply({"params": params}, x, cache)

    @functools.partial(jax.jit, donate_argnums=0)
    def unrolled(cache, params, x):
        for layer in range(L):
            own = jax.tree.map(operator.itemgetter(layer), params["layers"])
            (x, cache), _ = LinenBlock().apply({"params": own}, (x, cache), layer)
        return x, cache.advance(x.shape[1])

    results = (
        run(step, params, c, tokens(6), address)
        for step, c in ((scanned, cache), (unrolled, stacked_cache(L, num_kv_heads=2)))
    )
    assert_same(*results)


def test_nn_scan_that_drops_the_host_type_names_the_remedy(tokens, stacked_cache):
    cache = stacked_cache(L, num_kv_heads=2)
    params = LinenStack().init(jax.random.key(0), tokens(1), cache)["params"]
    with pytest.raises(ValueError, match="check_constancy_invariants=False"):
        LinenStack(check=True).apply({"params": params}, tokens(1), cache)
    assert not cache.pages.is_deleted()


def test_ragged_rows_in_a_stack(tokens, stacked_cache):
    graphdef, params = nnx.split(nnx_blocks())
    cache, lengths = stacked_cache(L, num_kv_heads=2), jnp.array([3, 0])

    @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
    def layers(carry, block, layer):
        return block(*carry, layer, query_seq_lengths=lengths)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, params, x):
        x, cache = layers((x, cache), nnx.merge(graphdef, params), jnp.arange(L))
        return x, cache.advance(lengths)

    _, cache = step(cache, params, tokens(3))
    assert cache.lengths.tolist() == [3, 0]
    assert not cache.overflowed.any()
