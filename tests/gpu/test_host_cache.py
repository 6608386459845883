"""A host cache on a GPU: used in place, guarded, freed; refused when the machine is too small."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")
SHAPE = {"num_kv_heads": 2, "head_dim": 128, "dtype": jnp.float32}


@functools.partial(jax.jit, donate_argnums=0)
def step(cache, q, k, v):
    for layer in range(cache.num_layers):
        out, cache = directkv_jax.decode_attention(q, k, v, cache, layer=layer)
        q = q + out
    return cache.advance(q.shape[1]), q


def new_tokens(seed=0, batch=2, count=1):
    return cache_builder.tokens(seed, batch, count, 8, 2, 128, jnp.float32)


def resident() -> int:
    """Bytes of host memory this process holds."""
    status = Path("/proc/self/status").read_text()
    found = re.findall(r"^(?:VmRSS|HugetlbPages):\s*(\d+) kB", status, re.M)
    return 1024 * sum(map(int, found))


@pytest.mark.parametrize("max_length", [256, 1 << 17], ids=["from XLA", "from our pool"])
def test_decodes_in_place(max_length):
    cache = directkv_jax.KVCache.create(2, max_length, num_layers=2, **SHAPE)
    pooled = cache.nbytes >= directkv_jax.memory.POOL_THRESHOLD_BYTES
    assert pooled == (max_length > 256)
    assert cache.pages.sharding.memory_kind == "pinned_host"
    pointers = cache_builder.pointers(cache)
    for seed in range(10):
        cache, _ = step(cache, *new_tokens(seed))
    assert cache_builder.pointers(cache) == pointers
    assert np.asarray(cache.lengths).tolist() == [10, 10]
    cache.delete()


def test_a_large_pool_is_copied_like_any_other_array():
    cache = directkv_jax.KVCache.create(1, 100_000, num_kv_heads=8, head_dim=128, num_layers=4)
    assert cache.nbytes > 1.5 * 2**30  # copies of less than that hide what large ones meet
    k, v = (jnp.full((1, 90_000, 8, 128), x, cache.dtype) for x in (2.0, 3.0))
    for layer in range(4):
        cache = directkv_jax.append(cache, k, v, layer=layer)
    pages = np.asarray(cache.pages)
    on_device = jax.device_put(cache.pages, jax.memory.Space.Device)
    for value in (2.0, 3.0):
        assert int(jnp.sum(on_device == value)) == 4 * 90_000 * 8 * 128
    np.testing.assert_array_equal(pages, np.asarray(on_device))
    cache.delete()


def test_placements_and_the_oracle_agree():
    results = {}
    for placement, implementation in (("host", "cuda"), ("device", "cuda"), ("host", "reference")):
        cache = directkv_jax.KVCache.create(2, 256, placement=placement, **SHAPE)
        for seed, count in enumerate((33, 1, 1, 5)):
            out, cache = directkv_jax.decode_attention(
                *new_tokens(seed, count=count), cache, implementation=implementation
            )
            cache = cache.advance(count)
        results[placement, implementation] = np.asarray(out)
    np.testing.assert_array_equal(results["host", "cuda"], results["device", "cuda"])
    np.testing.assert_allclose(
        results["host", "cuda"], results["host", "reference"], atol=2e-5, rtol=2e-5
    )


def test_while_loop_gives_the_steps():
    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, q, k, v):
        def body(carry):
            cache, q, n = carry
            return *step(cache, q, k, v), n + 1

        return jax.lax.while_loop(lambda carry: carry[2] < 20, body, (cache, q, jnp.int32(0)))[:2]

    q, k, v = map(jnp.asarray, new_tokens())
    looped, by_loop = loop(directkv_jax.KVCache.create(2, 256, num_layers=2, **SHAPE), q, k, v)
    cache = directkv_jax.KVCache.create(2, 256, num_layers=2, **SHAPE)
    for _ in range(20):
        cache, q = step(cache, q, k, v)
    np.testing.assert_allclose(np.asarray(by_loop), np.asarray(q), rtol=1e-6)
    assert np.asarray(looped.lengths).tolist() == np.asarray(cache.lengths).tolist()


def test_undonated_cache_is_refused():
    cache = directkv_jax.KVCache.create(2, 256, **SHAPE)

    @jax.jit
    def undonated(cache, q, k, v):
        out, cache = directkv_jax.decode_attention(q, k, v, cache)
        return cache.advance(1), out

    with pytest.raises(jax.errors.JaxRuntimeError, match="not donated"):
        jax.block_until_ready(undonated(cache, *new_tokens()))
    cache, _ = step(cache, *new_tokens())  # it kept its content and goes on
    assert np.asarray(cache.lengths).tolist() == [1, 1]


def test_cpu_kernels_are_refused():
    cache = directkv_jax.KVCache.create(2, 256, **SHAPE)
    with pytest.raises(NotImplementedError, match="not the CPU backend"):
        directkv_jax.attend(new_tokens()[0], cache, implementation="cpu")


def test_a_request_beyond_the_machine_ends_in_an_error():
    tokens = (4 << 40) // (64 * 2 * 8 * 128 * 2)  # 4 TiB in 64 layers
    with pytest.raises(MemoryError) as caught:
        directkv_jax.KVCache.create(1, tokens, num_layers=64, num_kv_heads=8, head_dim=128)
    text = str(caught.value)
    assert "available" in text
    assert "limit" in text
    assert "memory.max" in text or "MemTotal" in text
    assert any(unit in text for unit in ("GiB", "TiB", "bytes"))
    test_decodes_in_place(256)  # no pending CUDA error, and the process goes on


def test_delete_frees_the_pool_at_once():
    before = resident()
    cache = directkv_jax.KVCache.create(1, 1 << 20, num_kv_heads=8, head_dim=128)  # 4 GiB
    held = resident() - before
    cache.delete()
    assert held > 3 << 30
    assert resident() - before < 1 << 30
    with pytest.raises((ValueError, RuntimeError)):
        directkv_jax.attend(jnp.zeros((1, 1, 8, 128), jnp.bfloat16), cache)
