"""`directkv_jax.linen` against Flax's own modules with the same parameters."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import directkv_jax.linen

pytestmark = pytest.mark.usefixtures("strict_numerics")
# Float32 rounding of sums of some hundred products, outputs up to 6.
TOLERANCE = {"rtol": 1e-5, "atol": 3e-5}
Ours = directkv_jax.linen.MultiHeadDotProductAttention


def params_of(module, x):
    """Parameters with random biases and scales."""
    params = jax.jit(module.init)(jax.random.key(0), x)["params"]
    keys = iter(jax.random.split(jax.random.key(3), 16))
    return jax.tree.map(lambda p: p + 0.1 * jax.random.normal(next(keys), p.shape), params)


ALL_ELSE = {"normalize_qk": True, "use_bias": False, "qkv_features": 512, "out_features": 32}


@pytest.mark.parametrize("options", [{}, ALL_ELSE], ids=["plain", "all_else"])
def test_fifty_steps_equal_flax(options, tokens, linen_step):
    theirs = nn.MultiHeadDotProductAttention(num_heads=4, decode=True, **options)
    ours = Ours(num_heads=4, decode=True, page_size=16, **options)
    x = tokens(50)
    params = params_of(theirs, x)
    expected_cache = directkv_jax.linen.init_cache(theirs, x)
    cache = directkv_jax.linen.init_cache(ours, x)
    flax_step, step = linen_step(theirs), linen_step(ours)
    for t in range(50):
        expected_cache, expected = flax_step(expected_cache, params, x[:, t : t + 1])
        cache, y = step(cache, params, x[:, t : t + 1])
        np.testing.assert_allclose(y, expected, err_msg=f"step {t}", **TOLERANCE)
    assert cache["kv_cache"].lengths.tolist() == [50, 50]


def test_grouped_queries_equal_nnx(tokens, linen_step):
    kv_heads = 2
    theirs = nnx.MultiHeadAttention(4, 256, num_kv_heads=kv_heads, decode=False, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(theirs, nnx.Param))
    x = tokens(12)
    expected = theirs(x, is_causal=True)
    training = Ours(num_heads=4, num_kv_heads=kv_heads)
    y = training.apply({"params": params}, x, mask=nn.make_causal_mask(x[..., 0]))
    np.testing.assert_allclose(y, expected, **TOLERANCE)
    ours = Ours(num_heads=4, num_kv_heads=kv_heads, decode=True, page_size=16)
    cache, step = directkv_jax.linen.init_cache(ours, x), linen_step(ours)
    for t in range(12):
        cache, y = step(cache, params, x[:, t : t + 1])
        np.testing.assert_allclose(y, expected[:, t : t + 1], **TOLERANCE)


def test_outside_decoding_it_is_flax(tokens):
    options = {"num_heads": 4, "dropout_rate": 0.5}
    theirs, ours = nn.MultiHeadDotProductAttention(**options), Ours(**options)
    x = tokens(9)
    variables = {"params": params_of(nn.MultiHeadDotProductAttention(num_heads=4), x)}
    for named in (
        {"mask": nn.make_causal_mask(x[..., 0]), "deterministic": True},
        {"deterministic": False, "dropout_rng": jax.random.key(5)},
    ):
        np.testing.assert_array_equal(
            ours.apply(variables, x, **named), theirs.apply(variables, x, **named)
        )


def test_grouped_queries_train_with_dropout_and_sown_weights(tokens):
    ours = Ours(num_heads=4, num_kv_heads=2, dropout_rate=0.5, deterministic=False)
    x = tokens(4)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(ours.init)(keys, x)
    assert variables["params"]["key"]["kernel"].shape == (256, 2, 64)
    y, state = ours.apply(
        variables, x, sow_weights=True, rngs={"dropout": jax.random.key(2)},
        mutable=["intermediates"],
    )  # fmt: skip
    assert jnp.isfinite(y).all()
    assert state["intermediates"]["attention_weights"][0].shape == (2, 4, 4, 4)


def test_several_ragged_tokens_at_once(tokens, linen_step):
    theirs = nn.MultiHeadDotProductAttention(num_heads=4)
    ours = Ours(num_heads=4, decode=True, page_size=16)
    x = tokens(24)
    params = params_of(theirs, x)
    expected = theirs.apply({"params": params}, x, mask=nn.make_causal_mask(x[..., 0]))
    cache, step = directkv_jax.linen.init_cache(ours, x), linen_step(ours)
    done = np.zeros(2, int)
    for lengths in ([7, 3], [0, 2], [1, 1], [4, 0]):
        new = np.stack([x[b, done[b] : done[b] + 7] for b in range(2)])
        cache, y = step(cache, params, new, jnp.array(lengths))
        for b, n in enumerate(lengths):
            np.testing.assert_allclose(y[b, :n], expected[b, done[b] : done[b] + n], **TOLERANCE)
        done += lengths
    assert cache["kv_cache"].lengths.tolist() == done.tolist()


def test_overflow_raises_eagerly_and_flags_under_jit(tokens, linen_step):
    ours = Ours(num_heads=4, decode=True, page_size=16)
    variables = jax.jit(ours.init)(jax.random.key(0), tokens(16))
    params, cache = variables["params"], variables["cache"]
    step = linen_step(ours)
    cache, _ = step(cache, params, tokens(7), jnp.array([7, 7]))
    cache, _ = step(cache, params, tokens(7), jnp.array([7, 7]))
    with pytest.raises(ValueError, match="Row 0 holds 14 tokens and 3 more do not fit"):
        ours.apply({"params": params, "cache": cache}, tokens(3), mutable=["cache"])
    keys, _ = cache["kv_cache"].gather(0, 0, 0, 14)
    cache, y = step(cache, params, tokens(7), jnp.array([3, 2]))
    held = cache["kv_cache"]
    assert held.overflowed.tolist() == [True, False]
    assert held.lengths.tolist() == [14, 16]
    np.testing.assert_array_equal(held.gather(0, 0, 0, 14)[0], keys)
    assert jnp.isfinite(y).all()


def test_low_precision_and_batch_dimensions(tokens):
    ours = Ours(num_heads=4, decode=True, dtype=jnp.bfloat16)
    x = tokens(4, (2, 3))
    variables = jax.jit(ours.init)(jax.random.key(0), x)
    assert variables["cache"]["kv_cache"].dtype == jnp.bfloat16
    y, state = ours.apply(variables, x[..., :3, :], mutable=["cache"])
    exact = nn.MultiHeadDotProductAttention(num_heads=4).apply(
        {"params": variables["params"]}, x, mask=nn.make_causal_mask(x[..., 0])
    )
    np.testing.assert_allclose(y.astype(jnp.float32), exact[..., :3, :], atol=3e-2)
    assert state["cache"]["kv_cache"].lengths.tolist() == [3] * 6


def test_other_class_name_is_flax_too(tokens):
    class Around(nn.Module):
        attention: type

        @nn.compact
        def __call__(self, x):
            return self.attention(num_heads=4)(x)

    shapes = [
        jax.eval_shape(Around(attention).init, jax.random.key(0), tokens(2))
        for attention in (nn.MultiHeadAttention, directkv_jax.linen.MultiHeadAttention)
    ]
    assert shapes[0] == shapes[1]
