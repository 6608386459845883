"""What a cache says about itself, and where its bytes are."""

from __future__ import annotations

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import directkv_jax
from directkv_jax import PageLayout, memory

pytestmark = pytest.mark.usefixtures("strict_numerics")


def create(**options):
    sizes = {"num_kv_heads": 2, "head_dim": 80, "num_layers": 3, "page_size": 32} | options
    return directkv_jax.KVCache.create(2, 100, **sizes)


def test_sizes():
    cache = create()
    assert (cache.batch, cache.num_layers, cache.num_kv_heads, cache.head_dim) == (2, 3, 2, 80)
    assert (cache.max_pages, cache.max_length, cache.num_pages) == (4, 128, 8), "whole pages"
    assert cache.dtype == jnp.bfloat16
    assert cache.bytes_per_token == 2 * 3 * 2 * 80 * 2
    assert cache.nbytes == cache.pages.nbytes == cache.bytes_per_token * 2 * 128
    assert (cache.host_bytes, cache.device_bytes) == (cache.nbytes, 0)
    assert repr(cache) == (
        "KVCache(B=2, L=3, K=2, H=80, bfloat16, max_length=128, page_size=32, host, 0.5 MiB, "
        "lengths=[0, 0])"
    )


@pytest.mark.parametrize(("placement", "kind"), [("host", "pinned_host"), ("device", "device")])
def test_placement(placement, kind):
    cache = create(placement=placement)
    assert cache.pages.sharding.memory_kind == kind
    space = jax.memory.Space.Host if placement == "host" else jax.memory.Space.Device
    assert jax.typeof(cache.pages).memory_space == space
    assert (cache.host_bytes == 0) == (placement == "device")
    assert (cache.device_bytes == 0) == (placement == "host")
    for small in (cache.page_table, cache.lengths, cache.overflowed):
        assert small.sharding.memory_kind == "device", "lengths and tables are never host memory"


def test_the_default_pool_is_contiguous_and_any_other_is_the_callers_to_fill():
    assert np.asarray(create().page_table).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    cache = create(num_pages=20)
    assert (np.asarray(cache.page_table) == 20).all(), "out of range until filled"
    new = np.zeros((2, 1, 2, 80), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"`page_table` should hold page ids in \[0, 20\)"):
        directkv_jax.append(cache, new, new)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 20), (3, 17), (16, 32), (31, 33), (0, 48)])
def test_gather_takes_any_range(start, stop):
    built = cache_builder.build([48, 33], max_length=48, num_layers=2, dtype="float16")
    k, v = built.cache.gather(1, 1, start, stop)
    assert cache_builder.same_bits(k, built.keys[1, 1, start:stop])
    assert cache_builder.same_bits(v, built.values[1, 1, start:stop])


def test_gather_is_a_copy():
    cache = cache_builder.build([5], max_length=16).cache
    k, _ = cache.gather(0, 0, 0, 5)
    k[:] = 0
    assert np.abs(cache.gather(0, 0, 0, 5)[0]).min() > 0


def test_a_tile_holds_keys_then_values():
    """The order that `csrc/page_layout.h` documents; both sides are held to it."""
    layout = PageLayout(16, 2, 64, jnp.float32)
    tile = np.arange(layout.tile_elements, dtype=np.float32)
    both = layout.unpack(tile)
    assert both.shape == (2, 16, 64)
    assert both[0, 3, 5] == 3 * 64 + 5
    assert both[1, 3, 5] == (16 + 3) * 64 + 5
    assert (layout.pack(both) == tile).all()
    assert layout.page_bytes == 16 * layout.bytes_per_token == 16 * 2 * 2 * 64 * 4


def test_delete_frees_at_once():
    cache = create()
    pages = cache.pages
    cache.delete()
    assert pages.is_deleted()


def test_caches_made_under_jit_have_the_host_type():
    """Flax creates modules inside jit; the shapes and the memory are then those of a real one."""
    made = jax.eval_shape(create)
    assert made.pages.shape == create().pages.shape
    assert made.max_length == 128
    assert made.placement == "host"


def test_base_pointers_are_the_arrays_own():
    array = jnp.zeros((3, 5))
    assert memory.base_pointers(array) == [(array.unsafe_buffer_pointer(), 60)]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_more_memory_than_addresses(placement):
    with pytest.raises(MemoryError, match="memory"):
        directkv_jax.KVCache.create(
            1, 1 << 30, num_kv_heads=64, head_dim=512, dtype=jnp.float32, page_size=4096,
            placement=placement,
        )  # fmt: skip
