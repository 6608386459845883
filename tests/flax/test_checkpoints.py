"""Parameters travel between Flax's modules and ours, both ways; caches stay out of checkpoints."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx, serialization

import directkv_jax.linen
import directkv_jax.nnx

NNX = [{"num_kv_heads": 2}, {"normalize_qk": True, "use_bias": False}]


def nnx_pair(options):
    return (
        nnx.MultiHeadAttention(4, 256, decode=False, rngs=nnx.Rngs(0), **options),
        directkv_jax.nnx.MultiHeadAttention(4, 256, decode=False, rngs=nnx.Rngs(1), **options),
    )


@pytest.mark.parametrize("options", NNX)
@pytest.mark.parametrize("reverse", [False, True], ids=["from_flax", "to_flax"])
def test_nnx_state_merges(options, reverse, tokens):
    source, target = reversed(nnx_pair(options)) if reverse else nnx_pair(options)
    graphdef, own = nnx.split(target)
    state = nnx.state(source)
    assert jax.tree.structure(state) == jax.tree.structure(own)
    merged = nnx.merge(graphdef, state)
    assert type(merged) is type(target)
    np.testing.assert_array_equal(merged(tokens(3)), source(tokens(3)))


def test_nnx_cache_stays_out_of_a_checkpoint():
    theirs, ours = nnx_pair({})
    ours = nnx.view(ours, decode=True, batch_size=2, max_length=16)
    params = nnx.state(ours, nnx.Param)
    assert jax.tree.structure(params) == jax.tree.structure(nnx.state(theirs, nnx.Param))
    assert list(nnx.state(ours, nnx.Cache)) == ["kv_cache"]
    nnx.update(theirs, params)
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    assert ours.kv_cache.get_value().batch == 2


def test_linen_bytes_load_both_ways(tokens):
    options = {"normalize_qk": True}
    modules = (
        nn.MultiHeadDotProductAttention(num_heads=4, **options),
        directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, **options),
    )
    x = tokens(3)
    params = [jax.jit(m.init)(jax.random.key(i), x)["params"] for i, m in enumerate(modules)]
    for source, target in ((0, 1), (1, 0)):
        loaded = serialization.from_bytes(params[target], serialization.to_bytes(params[source]))
        np.testing.assert_array_equal(
            modules[target].apply({"params": loaded}, x),
            modules[source].apply({"params": params[source]}, x),
        )


def test_linen_cache_is_a_collection_of_its_own(tokens):
    ours = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, decode=True)
    variables = ours.init(jax.random.key(0), tokens(16))
    assert sorted(variables) == ["cache", "params"]
    assert list(variables["cache"]) == ["kv_cache"]
