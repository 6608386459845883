"""Where a cache comes from in linen, and Flax's zeros idiom, which cannot make one."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import directkv_jax.linen
import directkv_jax.nnx

Ours = directkv_jax.linen.MultiHeadDotProductAttention


class Two(nn.Module):
    decode: bool = True
    placement: str = "host"

    @nn.compact
    def __call__(self, x, *, normalize: bool = False):
        count = self.variable("cache", "calls", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        for _ in range(2):
            x = x + Ours(
                num_heads=4, decode=self.decode, cache_placement=self.placement, page_size=16
            )(x)
        return nn.LayerNorm()(x) if normalize else x


def zeros_of(model, x):
    """Flax's idiom for a cache without parameters."""
    abstract = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract)


def test_zeros_in_place_of_a_host_cache_are_refused(tokens):
    variables = zeros_of(Two(), tokens(32))
    for run in (Two().apply, jax.jit(Two().apply, static_argnames="mutable")):
        with pytest.raises(ValueError, match=r'placement "host".*directkv_jax\.linen\.init_cache'):
            run(variables, tokens(1), mutable=("cache",))


def test_zeros_in_place_of_a_device_cache_are_refused(tokens):
    model = Two(placement="device")
    variables = zeros_of(model, tokens(32))
    with pytest.raises(ValueError, match=r"all zeros.*directkv_jax\.linen\.init_cache"):
        model.apply(variables, tokens(1), mutable=["cache"])
    params = model.init(jax.random.key(0), tokens(32))["params"]
    y, state = jax.jit(lambda v, x: model.apply(v, x, mutable=["cache"]))(
        {**variables, "params": params}, tokens(1)
    )
    assert jnp.isnan(y).all()
    assert state["cache"]["MultiHeadDotProductAttention_0"]["kv_cache"].overflowed.all()


@pytest.mark.parametrize("placement", ["host", "device"])
def test_init_cache_allocates_what_init_does(placement, tokens):
    model = Two(placement=placement)
    dummy = jax.ShapeDtypeStruct((2, 32, 256), jnp.float32)
    cache = directkv_jax.linen.init_cache(model, dummy, normalize=True)
    variables = model.init(jax.random.key(0), tokens(32))
    same = jax.tree.map(lambda a, b: jax.typeof(a) == jax.typeof(b), cache, variables["cache"])
    assert jax.tree.all(same)
    x = tokens(3)
    fresh = {
        "params": variables["params"],
        "cache": {**cache, "calls": variables["cache"]["calls"]},
    }
    expected, _ = model.apply(variables, x, mutable=["cache"])
    y, state = model.apply(fresh, x, mutable=["cache"])
    np.testing.assert_array_equal(y, expected)
    assert state["cache"]["MultiHeadDotProductAttention_1"]["kv_cache"].placement == placement


def test_init_under_jit_makes_a_host_cache(tokens):
    variables = jax.jit(Two().init)(jax.random.key(0), tokens(32))
    held = variables["cache"]["MultiHeadDotProductAttention_0"]["kv_cache"]
    assert "<host>" in str(jax.typeof(held.pages))
    y, _ = Two().apply(variables, tokens(1), mutable=["cache"])
    assert jnp.isfinite(y).all()


def test_init_cache_refuses_what_it_cannot_make(tokens):
    with pytest.raises(ValueError, match=r"Ours|MultiHead.*Construct it with decode=True"):
        directkv_jax.linen.init_cache(Ours(num_heads=4), tokens(32))
    stacked = nn.vmap(
        Ours, variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True}, in_axes=None,
        axis_size=3,
    )  # fmt: skip
    with pytest.raises((ValueError, NotImplementedError), match="num_layers=L"):
        directkv_jax.linen.init_cache(stacked(num_heads=4, decode=True), tokens(32))


def test_zeros_of_an_abstract_nnx_model_are_refused(tokens):
    def make():
        model = directkv_jax.nnx.MultiHeadAttention(4, 256, decode=True, rngs=nnx.Rngs(0))
        model.init_cache((2, 32, 256))
        return model

    graphdef, state = nnx.split(nnx.eval_shape(make))
    state = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype) if not jnp.issubdtype(s.dtype, jax.dtypes.prng_key)
        else jax.random.key(0), state,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r'placement "host".*`init_cache`'):
        nnx.merge(graphdef, state)(tokens(1))
