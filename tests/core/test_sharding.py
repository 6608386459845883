"""A cache split over four devices gives what the whole one gives, and stays in place on each."""

from __future__ import annotations

import functools

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import directkv_jax
from directkv_jax import _pages
from directkv_jax.implementations import get

pytestmark = pytest.mark.usefixtures("strict_numerics")

# `reference` is sharded by the very code of `xla`.
FAST = pytest.mark.parametrize("implementation", ["cpu", "xla", "cuda"], indirect=True)

B, K, N, H, L, T = 4, 4, 8, 64, 2, 8
SPLITS = {
    "heads": ((4,), ("tensor",), {"kv_head_axis": "tensor"}),
    "rows": ((4,), ("data",), {"batch_axis": "data"}),
    "both": ((2, 2), ("data", "tensor"), {"batch_axis": "data", "kv_head_axis": "tensor"}),
    "one_of_two_axes": ((2, 2), ("data", "tensor"), {"kv_head_axis": "tensor"}),
}


def create(**options):
    return directkv_jax.KVCache.create(
        B, 48, num_kv_heads=K, head_dim=H, num_layers=L, dtype=jnp.float32, page_size=16, **options
    )


def split(devices, name):
    shape, names, axes = SPLITS[name]
    return create(mesh=Mesh(np.array(devices).reshape(shape), names), **axes)


@functools.cache
def step_of(implementation, jitted):
    """One for all tests, so that each split is compiled once."""

    def step(cache, query, key, value, n):
        outs = []
        for layer in range(L):
            (out, lse), cache = directkv_jax.decode_attention(
                query, key + layer, value, cache, layer=layer, query_seq_lengths=n,
                return_residual=True, local_window_size=(20, 0), implementation=implementation,
            )  # fmt: skip
            outs.append((out, lse))
        return cache.advance(n), outs

    return jax.jit(step, donate_argnums=0) if jitted else step


def run_steps(cache, implementation, jitted=True):
    """Four ragged steps, past a page boundary; the cache, and outputs of all layers."""
    step, results = step_of(implementation, jitted), []
    for i, n in enumerate(([8, 2, 0, 8], [8, 1, 0, 8], [1, 3, 1, 0], [0, 8, 1, 2])):
        tokens = cache_builder.tokens(i, B, T, N, K, H, "float32")
        cache, outs = step(cache, *tokens, np.int32(n))
        results.append(outs)
    return cache, jax.tree.map(np.asarray, results)


@functools.cache
def whole_cache(implementation):
    """The same steps without a mesh."""
    return run_steps(create(), implementation)


@FAST
@pytest.mark.parametrize("name", SPLITS)
def test_a_split_cache_equals_the_whole_one(implementation, four_devices, name):
    whole, expected = whole_cache(implementation)
    cache = split(four_devices, name)
    before = cache_builder.pointers(cache)
    cache, results = run_steps(cache, implementation)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6), results, expected
    )
    assert cache_builder.pointers(cache) == before, "every shard stays where it is"
    assert len(before) == 4
    assert cache.pages.sharding.memory_kind == "pinned_host"
    for row, length in enumerate(np.asarray(whole.lengths)):
        assert int(cache.lengths[row]) == length
        for layer in range(L):
            for a, b in zip(
                cache.gather(layer, row, 0, length), whole.gather(layer, row, 0, length),
                strict=True,
            ):  # fmt: skip
                assert cache_builder.same_bits(a, b)


def test_gather_from_a_split_cache_without_native_kernels(four_devices, monkeypatch):
    cache, _ = run_steps(split(four_devices, "heads"), "xla")
    monkeypatch.setattr(_pages, "_page_mover", lambda cache: get("xla"))
    monkeypatch.setattr(_pages, "jitted_read_pages", jax.jit(_pages.read_pages))
    expected = whole_cache("xla")[0].gather(1, 0, 0, 9)
    for a, b in zip(cache.gather(1, 0, 0, 9), expected, strict=True):
        assert cache_builder.same_bits(a, b)


@FAST
def test_eager_calls_on_a_split_cache(implementation, four_devices):
    _, expected = whole_cache(implementation)
    _, results = run_steps(split(four_devices, "both"), implementation, jitted=False)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6), results, expected
    )


@FAST
def test_overflow_of_a_split_cache_is_per_row(implementation, four_devices):
    cache = split(four_devices, "both").replace(lengths=jnp.int32([0, 47, 46, 20]))
    tokens = cache_builder.tokens(0, B, T, K, K, H, "float32")
    step = jax.jit(
        lambda c, k, v: directkv_jax.append(c, k, v, implementation=implementation).advance(T),
        donate_argnums=0,
    )
    cache = step(cache, *tokens[1:])
    assert np.asarray(cache.overflowed).tolist() == [False, True, True, False]
    assert np.asarray(cache.lengths).tolist() == [8, 47, 46, 28]


@FAST
def test_forks_of_a_cache_split_over_heads(implementation, four_devices):
    cache, _ = run_steps(split(four_devices, "heads"), implementation)
    before, rows = cache_builder.pointers(cache), [0, 0, 3, 3]
    lengths = np.asarray(cache.lengths)[rows]
    contents = [cache.gather(1, r, 0, n) for r, n in zip(rows, lengths, strict=True)]
    cache = cache.fork(np.int32(rows))
    assert cache_builder.pointers(cache) == before
    tokens = cache_builder.tokens(0, B, 1, K, K, H, "float32")
    cache = directkv_jax.append(cache, *tokens[1:], layer=1, implementation=implementation)
    for row, (keys, values) in enumerate(contents):
        k, v = cache.gather(1, row, 0, lengths[row] + 1)
        assert cache_builder.same_bits(k, np.concatenate([keys, tokens[1][row]]))
        assert cache_builder.same_bits(v, np.concatenate([values, tokens[2][row]]))


@pytest.mark.parametrize("name", SPLITS)
def test_no_step_compiles_again(four_devices, name, compilations):
    cache = split(four_devices, name)
    step = jax.jit(lambda c, k, v: directkv_jax.append(c, k, v).advance(1), donate_argnums=0)
    _, key, value = cache_builder.tokens(0, B, 1, K, K, H, "float32")
    cache = step(cache, key, value)
    before = compilations()
    cache = step(step(cache, key, value), key, value)
    assert compilations() == before


def test_bytes_are_shared_out(four_devices):
    cache = split(four_devices, "both")
    sizes = [n for _, n in directkv_jax.memory.base_pointers(cache.pages)]
    assert sizes == [cache.nbytes // 4] * 4
    assert np.asarray(cache.page_table).tolist() == [[0, 1, 2], [3, 4, 5]] * 2, "ids of the shard"


@pytest.mark.parametrize("name", ["rows", "both"])
def test_moving_rows_between_devices_is_refused(four_devices, name):
    cache = split(four_devices, name)
    for method in (cache.fork, cache.take_rows):
        with pytest.raises(NotImplementedError, match="batch is split over mesh axis 'data'"):
            method(np.int32([0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("sizes", "axes", "message"),
    [
        ({"num_kv_heads": 6}, {"kv_head_axis": "x"}, r"`num_kv_heads` .* 4 shards .*'x'.* got 6"),
        ({"batch": 3}, {"batch_axis": "x"}, r"`batch` .* 4 shards of mesh axis 'x', but got 3"),
        ({"num_pages": 10}, {"batch_axis": "x"}, r"`num_pages` .* 4 shards .* got 10"),
        ({}, {"kv_head_axis": "y"}, r"mesh has axes \('x',\), but no 'y'"),
    ],
)
def test_uneven_splits_are_refused(four_devices, sizes, axes, message):
    sizes = {"batch": 4, "num_kv_heads": 4, **sizes}
    with pytest.raises(ValueError, match=message):
        directkv_jax.KVCache.create(
            max_length=48, head_dim=64, mesh=Mesh(np.array(four_devices), ("x",)), **sizes, **axes
        )


def test_axes_need_a_mesh():
    with pytest.raises(ValueError, match=r"`batch_axis` and `kv_head_axis` need a `mesh`"):
        create(kv_head_axis="x")
