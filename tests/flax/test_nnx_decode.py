"""`directkv_jax.nnx` against Flax's own module with the same parameters."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import directkv_jax.nnx

pytestmark = pytest.mark.usefixtures("strict_numerics")
# Float32 rounding of sums of some hundred products, outputs up to 6.
TOLERANCE = {"rtol": 1e-5, "atol": 3e-5}


def pair(seed=0, **options):
    """(Flax's module, ours) with equal parameters; biases and scales are random too."""
    theirs = nnx.MultiHeadAttention(4, 256, rngs=nnx.Rngs(seed), **options)
    ours = directkv_jax.nnx.MultiHeadAttention(
        4, 256, rngs=nnx.Rngs(seed + 1), page_size=16, **options
    )
    params = nnx.state(theirs, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(3), 16))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)
    nnx.update(theirs, params)
    nnx.update(ours, params)
    return theirs, ours


ALL_ELSE = {
    "num_kv_heads": 1, "use_bias": False, "normalize_qk": True, "qkv_features": 512,
    "out_features": 32,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, ALL_ELSE], ids=["mha", "gqa", "mqa"])
def test_fifty_steps_equal_flax(options, tokens, nnx_step):
    theirs, ours = pair(decode=True, **options)
    x = tokens(50)
    theirs.init_cache(x.shape)
    ours.init_cache(x.shape)
    flax_step = nnx.jit(lambda model, x: model(x))
    step, cache, rest = nnx_step(ours)
    for t in range(50):
        expected = flax_step(theirs, x[:, t : t + 1])
        cache, y = step(cache, rest, x[:, t : t + 1])
        np.testing.assert_allclose(y, expected, err_msg=f"step {t}", **TOLERANCE)
    assert cache["kv_cache"].get_value().lengths.tolist() == [50, 50]


def test_every_implementation_equals_flax(implementation, tokens):
    theirs, ours = pair(decode=True, num_kv_heads=2)
    ours.implementation = implementation
    x = tokens(3)
    theirs.init_cache(x.shape)
    ours.init_cache(x.shape)
    for t in range(3):
        np.testing.assert_allclose(ours(x[:, t : t + 1]), theirs(x[:, t : t + 1]), **TOLERANCE)


def test_outside_decoding_it_is_flax(tokens):
    theirs, ours = pair(decode=False, num_kv_heads=2, dropout_rate=0.5)
    x = tokens(9)
    mask = nnx.make_causal_mask(x[..., 0])
    for options in (
        {"mask": mask, "deterministic": True},
        {"is_causal": True, "deterministic": True},
        {"deterministic": False, "rngs": nnx.Rngs(5)},
    ):
        again = dict(options, rngs=nnx.Rngs(5)) if "rngs" in options else options
        np.testing.assert_array_equal(ours(x, **options), theirs(x, **again))
    assert ours(x, x + 1, deterministic=True).shape == x.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # nnx would rather have nnx.capture
        ours(x, deterministic=True, sow_weights=True)
    assert nnx.state(ours, nnx.Intermediate)


def test_gradients_outside_decoding_are_flax(tokens):
    theirs, ours = pair(decode=False)
    x = tokens(5)
    loss = nnx.jit(nnx.grad(lambda model: jnp.sum(model(x, is_causal=True) ** 2)))
    jax.tree.map(np.testing.assert_array_equal, loss(ours).raw_mapping, loss(theirs).raw_mapping)


@pytest.mark.parametrize("chunks", [(12,), (1, 11), (5, 1, 6)])
def test_several_tokens_at_once_are_causal(chunks, tokens):
    theirs, ours = pair(decode=True, num_kv_heads=2)
    x = tokens(12)
    expected = theirs(x, is_causal=True, decode=False)
    ours.init_cache(x.shape)
    parts = jnp.split(x, np.cumsum(chunks)[:-1], axis=1)
    y = jnp.concatenate([ours(part) for part in parts], axis=1)
    np.testing.assert_allclose(y, expected, **TOLERANCE)


def test_ragged_rows_equal_each_row_alone(tokens, nnx_step):
    theirs, ours = pair(decode=True)
    x = tokens(20)
    expected = theirs(x, is_causal=True, decode=False)
    ours.init_cache((2, 32, 256))
    step, cache, rest = nnx_step(ours)
    done = np.zeros(2, int)
    for lengths in ([7, 3], [0, 2], [1, 1], [4, 0], [1, 5]):
        new = np.stack([x[b, done[b] : done[b] + 7] for b in range(2)])
        cache, y = step(cache, rest, new, jnp.array(lengths))
        for b, n in enumerate(lengths):
            np.testing.assert_allclose(y[b, :n], expected[b, done[b] : done[b] + n], **TOLERANCE)
        done += lengths
    assert cache["kv_cache"].get_value().lengths.tolist() == done.tolist()


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_number_of_batch_dimensions(batch, tokens):
    theirs, ours = pair(decode=True)
    x = tokens(2, batch)
    theirs.init_cache(x.shape)
    ours.init_cache(x.shape)
    lengths = jnp.ones(batch, int)
    for t in range(2):
        y = ours(x[..., t : t + 1, :], query_seq_lengths=lengths)
        np.testing.assert_allclose(y, theirs(x[..., t : t + 1, :]), **TOLERANCE)


def test_half_precision_is_near_float32(tokens):
    dtype = jnp.float16
    theirs, _ = pair(decode=False)
    ours = directkv_jax.nnx.MultiHeadAttention(4, 256, dtype=dtype, decode=True, rngs=nnx.Rngs(0))
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    x = tokens(6)
    ours.init_cache(x.shape)
    assert ours.kv_cache.get_value().dtype == dtype
    y = ours(x)
    assert y.dtype == dtype
    exact = theirs(x, is_causal=True)
    low = nnx.MultiHeadAttention(4, 256, dtype=dtype, decode=False, rngs=nnx.Rngs(0))
    nnx.update(low, nnx.state(theirs, nnx.Param))
    error = jnp.abs(y - exact).max()
    assert error <= 3 * jnp.abs(low(x, is_causal=True) - exact).max()


def test_views_allocate_share_and_leave_behind(tokens):
    _, ours = pair()
    model = nnx.Dict(attention=ours)
    view = nnx.view(model, decode=True, batch_size=2, max_length=40)
    assert ours.kv_cache is None
    held = view.attention.kv_cache.get_value()
    assert (held.batch, held.max_length, held.placement) == (2, 48, "host")
    view.attention(tokens(3))
    other = nnx.view(view, deterministic=True)
    assert other.attention.kv_cache is view.attention.kv_cache
    assert nnx.view(view, decode=False).attention.kv_cache is None
    fresh = nnx.view(view, decode=True, batch_size=(2, 2), max_length=16)
    assert fresh.attention.kv_cache.get_value().lengths.tolist() == [0] * 4
    assert view.attention.kv_cache.get_value().lengths.tolist() == [3, 3]
    assert "batch_size" in nnx.view_info(model)


def test_reset_by_a_map_over_the_state(tokens):
    _, ours = pair(decode=True)
    ours.init_cache((2, 16, 256))
    first = ours(tokens(4))
    reset = jax.tree.map(
        lambda cache: cache.reset(),
        nnx.state(ours, nnx.Cache),
        is_leaf=lambda x: isinstance(x, directkv_jax.KVCache),
    )
    nnx.update(ours, reset)
    np.testing.assert_array_equal(ours(tokens(4)), first)


def test_overflow_raises_eagerly_and_flags_under_jit(tokens, nnx_step):
    _, ours = pair(decode=True)
    ours.init_cache((2, 16, 256))
    ours(tokens(15))
    before = ours.kv_cache.get_value()
    keys, _ = before.gather(0, 0, 0, 15)
    with pytest.raises(ValueError, match="Row 0 holds 15 tokens and 2 more do not fit"):
        ours(tokens(2))
    step, cache, rest = nnx_step(ours)
    cache, y = step(cache, rest, tokens(2), jnp.array([2, 1]))
    held = cache["kv_cache"].get_value()
    assert held.overflowed.tolist() == [True, False]
    assert held.lengths.tolist() == [15, 16]
    np.testing.assert_array_equal(held.gather(0, 0, 0, 15)[0], keys)
    assert jnp.isfinite(y).all()


def test_sharded_over_kv_heads(four_devices, tokens):
    mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,), devices=four_devices[:2])
    theirs, _ = pair(decode=True)
    ours = directkv_jax.nnx.MultiHeadAttention(
        4, 256, decode=True, mesh=mesh, kv_head_axis="model", rngs=nnx.Rngs(0)
    )
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    x = tokens(3)
    theirs.init_cache(x.shape)
    ours.init_cache(x.shape)
    for t in range(3):
        np.testing.assert_allclose(ours(x[:, t : t + 1]), theirs(x[:, t : t + 1]), **TOLERANCE)
