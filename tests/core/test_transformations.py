"""jit, donation, scan, while_loop, vmap and grad, and that the pages stay where they are."""

from __future__ import annotations

import subprocess
import sys

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")

LENGTHS = [7, 20]
LAYERS = 3


def build(seed=0):
    return cache_builder.build(LENGTHS, max_length=48, num_layers=LAYERS, seed=seed)


def stacked_tokens(seed, steps=1):
    """query, key, value with leading axes [steps, L]."""
    tokens = cache_builder.tokens(seed, steps * LAYERS * 2, 1, 4, 2, 64, "float32")
    return [x.reshape(steps, LAYERS, 2, *x.shape[1:]) for x in tokens]


def decode(cache, tokens, layer, implementation):
    return directkv_jax.decode_attention(*tokens, cache, layer=layer, implementation=implementation)


def unrolled(implementation):
    def step(cache, query, key, value):
        outs = []
        for layer in range(LAYERS):
            tokens = (query[layer], key[layer], value[layer])
            out, cache = decode(cache, tokens, layer, implementation)
            outs.append(out)
        return cache.advance(1), jnp.stack(outs)

    return jax.jit(step, donate_argnums=0)


def scanned(implementation):
    def step(cache, query, key, value):
        def layer_step(cache, xs):
            layer, *tokens = xs
            out, cache = decode(cache, tokens, layer, implementation)
            return cache, out

        cache, outs = jax.lax.scan(layer_step, cache, (jnp.arange(LAYERS), query, key, value))
        return cache.advance(1), outs

    return jax.jit(step, donate_argnums=0)


def reference_steps(steps, seed=0):
    """Outputs and final contents by the oracle, step by step."""
    built, tokens = build(seed), stacked_tokens(1, steps)
    keys, values, lengths, outs = built.keys.copy(), built.values.copy(), list(LENGTHS), []
    for query, key, value in zip(*tokens, strict=True):
        outs.append(
            [
                oracle.attend(
                    query[layer], keys[layer], values[layer], lengths, key[layer], value[layer]
                )[0]
                for layer in range(LAYERS)
            ]
        )
        for b in range(2):
            keys[:, b, lengths[b]], values[:, b, lengths[b]] = key[:, b, 0], value[:, b, 0]
        lengths = [n + 1 for n in lengths]
    return np.array(outs), keys, values, lengths


@pytest.mark.parametrize("form", [unrolled, scanned])
def test_jitted_steps_are_exact_and_in_place(implementation, form, compilations):
    steps = 4
    expected, keys, values, lengths = reference_steps(steps)
    step, cache = form(implementation), build().cache
    address = cache_builder.pointers(cache)
    for i, tokens in enumerate(zip(*stacked_tokens(1, steps), strict=True)):
        before = compilations()
        cache, out = step(cache, *tokens)
        assert compilations() == before + (i == 0), "no step compiles again"
        np.testing.assert_allclose(out, expected[i], rtol=0, atol=1e-5)
        assert cache_builder.pointers(cache) == address
    assert np.asarray(cache.lengths).tolist() == lengths
    got = cache_builder.read_tokens(cache)
    assert cache_builder.same_bits(got[0], keys)
    assert cache_builder.same_bits(got[1], values)


def test_while_loop_is_exact_and_in_place(implementation):
    steps = 4
    expected, keys, _, lengths = reference_steps(steps)
    tokens = [jnp.asarray(x) for x in stacked_tokens(1, steps)]

    def loop(cache, query, key, value):
        def body(state):
            i, cache, outs = state
            at = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in (query, key, value)]
            for layer in range(LAYERS):
                out, cache = decode(cache, [x[layer] for x in at], layer, implementation)
                outs = outs.at[i, layer].set(out)
            return i + 1, cache.advance(1), outs

        outs = jnp.zeros(query.shape, query.dtype)
        start = (jnp.int32(0), cache, outs)
        return jax.lax.while_loop(lambda state: state[0] < steps, body, start)[1:]

    cache = build().cache
    address = cache_builder.pointers(cache)
    cache, outs = jax.jit(loop, donate_argnums=0)(cache, *tokens)
    assert cache_builder.pointers(cache) == address
    np.testing.assert_allclose(outs, expected, rtol=0, atol=1e-5)
    assert np.asarray(cache.lengths).tolist() == lengths
    assert cache_builder.same_bits(cache_builder.read_tokens(cache)[0], keys)


def test_eager_calls_consume_the_cache_they_are_given(implementation):
    built = build()
    tokens = [x[0, 0] for x in stacked_tokens(1)]
    address = cache_builder.pointers(built.cache)
    _, cache = decode(built.cache, tokens, 0, implementation)
    assert cache_builder.pointers(cache) == address
    for use in (
        lambda: decode(built.cache, tokens, 0, implementation),
        lambda: directkv_jax.attend(tokens[0], built.cache, implementation=implementation),
        lambda: directkv_jax.append(built.cache, *tokens[1:], implementation=implementation),
        lambda: built.cache.gather(0, 0, 0, 1),
        lambda: built.cache.fork(np.int32([0, 1])),
        lambda: built.cache.advance(1),
        lambda: built.cache.truncate(0),
        lambda: built.cache.take_rows(np.int32([1, 0])),
        lambda: built.cache.reset(),
    ):
        with pytest.raises(
            ValueError, match=r"already donated .* Use the cache that the call retur"
        ):
            use()
    directkv_jax.attend(tokens[0], cache, implementation=implementation)  # reading consumes nothing
    directkv_jax.attend(tokens[0], cache, implementation=implementation)


def test_an_array_the_cache_shares_is_not_lost(implementation):
    """The page table of the caller is not donated behind their back by the jitted step."""
    cache = build().cache
    tokens = [x[0, 0] for x in stacked_tokens(1)]
    step = jax.jit(
        lambda cache, *tokens: decode(cache, tokens, 0, implementation), donate_argnums=0
    )
    out, cache = step(cache, *tokens)
    out, cache = step(cache, *tokens)
    assert np.isfinite(out).all()
    assert np.asarray(cache.page_table).shape == (2, 3)


_UNDONATED = """
import jax, numpy as np, jax.numpy as jnp, directkv_jax
cache = directkv_jax.KVCache.create(1, 64, num_kv_heads=2, head_dim=64, dtype=jnp.float32)
new = np.ones((1, 1, 2, 64), np.float32)
step = lambda cache: directkv_jax.append(cache, new, new, implementation="{name}")
try:
    jax.block_until_ready(jax.jit(step)(cache))
except Exception as error:
    print(type(error).__name__, error)
cache = jax.jit(step, donate_argnums=0)(cache).advance(1)
print("goes on with", np.asarray(cache.lengths), cache.gather(0, 0, 0, 1)[0].sum())
"""


def test_a_cache_that_was_not_donated_is_refused(native):
    # A process of its own: where a cache of this size was freed, a copy could pass for that cache.
    # -P: the installed package, not the folder of its sources.
    done = subprocess.run(
        [sys.executable, "-P", "-c", _UNDONATED.format(name=native)], capture_output=True, text=True
    )
    assert "the cache was not donated" in done.stdout, done.stdout + done.stderr
    assert "donate_argnums" in done.stdout
    assert "goes on with [1] 128.0" in done.stdout, "the process and the cache survive"


def test_adopt_accepts_a_deliberate_copy(native):
    cache = build().cache
    copy = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), cache)
    _, key, value = (x[0, 0] for x in stacked_tokens(1))
    copy = directkv_jax.append(copy.adopt(), key, value, implementation=native).advance(1)
    assert cache_builder.same_bits(copy.gather(0, 0, 7, 8)[0], key[0])
    assert np.isnan(cache.gather(0, 0, 7, 8)[0]).all(), "the original is another cache"


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("axes", [(0, 0), (2, 1), (0, None)])
def test_vmap_over_queries_of_a_shared_cache(implementation, fresh, axes):
    """What is mapped folds into the batch; the cache is read where it lies."""
    built = build()
    groups = [cache_builder.tokens(i, 2, 2, 4, 2, 64, "float32") for i in range(3)]
    query, key, value = (np.stack(x) for x in zip(*groups, strict=True))
    query_axis, token_axis = axes
    if token_axis is None:
        groups = [(q, *groups[0][1:]) for q, _, _ in groups]
        key, value = groups[0][1:]

    def attend(cache, query, key, value):
        tokens = (key, value) if fresh else ()
        return directkv_jax.attend(
            query, cache, *tokens, layer=1, return_residual=True, implementation=implementation
        )

    mapped = jax.vmap(attend, in_axes=(None, query_axis, token_axis, token_axis))
    query = np.moveaxis(query, 0, query_axis)
    if token_axis is not None:
        key, value = np.moveaxis(key, 0, token_axis), np.moveaxis(value, 0, token_axis)
    out, lse = jax.jit(mapped)(built.cache, query, key, value)
    for i, tokens in enumerate(groups):
        expected, expected_lse = attend(built.cache, *tokens)
        np.testing.assert_allclose(out[i], expected, rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse[i], expected_lse, rtol=0, atol=2e-5)


def test_vmap_over_lengths_of_a_shared_cache(implementation):
    built = build()
    query, _, _ = cache_builder.tokens(0, 2, 1, 4, 2, 64, "float32")
    lengths = np.int32([[7, 20], [3, 0], [0, 16]])

    def out_of(cache, n):
        return directkv_jax.attend(query, cache.replace(lengths=n), implementation=implementation)

    out = jax.jit(jax.vmap(out_of, in_axes=(None, 0)))(built.cache, lengths)
    for i in range(3):
        oracle.check(out[i], None, "float32", query, built.keys[0], built.values[0], lengths[i])


def test_vmap_over_a_cache_is_refused_by_name(native):
    cache = build().cache
    query, key, value = cache_builder.tokens(0, 2, 1, 4, 2, 64, "float32")
    with pytest.raises(NotImplementedError, match=r"vmap over the cache .* not supported: .* copy"):
        jax.vmap(
            lambda layer: directkv_jax.attend(query, cache, layer=layer, implementation=native)
        )(jnp.arange(3))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), cache.replace(pages=None))
    pages = directkv_jax.memory.allocate((2, *cache.pages.shape), cache.dtype, "host")
    with pytest.raises(NotImplementedError, match=r"jax.vmap over the cache"):
        jax.vmap(
            lambda pages, rest: directkv_jax.attend(
                query, rest.replace(pages=pages), implementation=native
            )
        )(pages, many)
    with pytest.raises(NotImplementedError, match=r"vmap of `append` is not supported"):
        jax.vmap(lambda key: directkv_jax.append(cache, key, value, implementation=native).lengths)(
            jnp.stack([key, key])
        )


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_gradients_are_refused_and_name_the_training_path(implementation, argument):
    cache = build().cache
    tokens = [jnp.asarray(x[0, 0]) for x in stacked_tokens(1)]

    def loss(*tokens):
        return directkv_jax.attend(
            tokens[0], cache, *tokens[1:], implementation=implementation
        ).sum()

    with pytest.raises(NotImplementedError, match=r"no gradient.*jax.nn.dot_product_attention"):
        jax.grad(loss, argnums=argument)(*tokens)


def test_gradients_of_a_written_cache_are_refused(implementation):
    cache = build().cache
    tokens = [jnp.asarray(x[0, 0]) for x in stacked_tokens(1)]

    def loss(key):
        out, _ = decode(cache, (tokens[0], key, tokens[2]), 0, implementation)
        return out.sum()

    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(loss)(tokens[1])


def test_a_cache_is_a_pytree_of_four_arrays():
    cache = build().cache
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 4
    again = jax.tree.unflatten(tree, leaves)
    assert again.layout == cache.layout
    assert again.placement == "host"
    shapes = jax.eval_shape(lambda c: c.advance(1), cache)
    assert shapes.pages.shape == cache.pages.shape
    assert shapes.max_length == cache.max_length
