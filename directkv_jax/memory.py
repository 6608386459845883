"""Where the bytes of a cache live: typed host arrays, pinned pools, and how they are allocated."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from directkv_jax import _native
from directkv_jax._platform import DEVICE, HOST, any_tracer, default_device, platform_of

PLACEMENTS = ("host", "device")

# From this size on, a host cache on a GPU comes from our own pool: XLA's pinned allocator rounds
# sizes up to powers of two and stops at 64 GiB.
POOL_THRESHOLD_BYTES = 256 << 20


def space_of(placement: str) -> Any:
    """The JAX memory space of a placement, "host" or "device"."""
    if placement not in PLACEMENTS:
        raise ValueError(f'`placement` should be "host" or "device", but got {placement!r}.')
    return HOST if placement == "host" else DEVICE


def memory_kind(placement: str) -> str:
    """The JAX memory kind of a placement."""
    return "pinned_host" if space_of(placement) is HOST else "device"


def allocate(
    shape: Sequence[int], dtype, placement: str, sharding: NamedSharding | None = None
) -> jax.Array:
    """Allocates an array in host or device memory without touching the other. Not initialised.

    Args:
      shape: the global shape.
      dtype: its dtype.
      placement: "host" (page-locked memory the device can read) or "device".
      sharding: how it is laid over a mesh; its memory kind is set from `placement`.

    Raises:
      MemoryError: the memory cannot be had; of page-locked memory, names asked, available and the
        limit.
    """
    shape, space = tuple(shape), space_of(placement)
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    if sharding is not None:
        sharding = sharding.with_memory_kind(memory_kind(placement))
    mesh = None if sharding is None else sharding.mesh
    on_cuda = platform_of(mesh=mesh) == "cuda"
    if placement == "host" and on_cuda and nbytes >= POOL_THRESHOLD_BYTES and not _tracing():
        return _allocate_pool(shape, dtype, sharding or _one_device_sharding("host"))
    try:
        return _empty(shape, jnp.dtype(dtype), space if sharding is None else sharding)()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(f"{nbytes} bytes of {placement} memory cannot be had: {error}") from error


@functools.lru_cache(maxsize=64)
def _empty(shape, dtype, where):
    # device_put alone does not fix the layout of a result: without out_shardings it is replicated.
    layout = {} if isinstance(where, jax.memory.Space) else {"out_shardings": where}
    return jax.jit(lambda: jax.device_put(jax.lax.empty(shape, dtype), where), **layout)


def _tracing() -> bool:
    return any_tracer(jnp.zeros(()))


def _one_device_sharding(placement: str) -> NamedSharding:
    device = default_device()
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    mesh = Mesh(np.array([device]), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind(placement))


def _allocate_pool(shape, dtype, sharding: NamedSharding) -> jax.Array:
    native = _native.load("cuda")
    if isinstance(native, str):
        raise MemoryError(f"A page-locked pool needs the CUDA build of directkv_jax: {native}")
    local = sharding.shard_shape(shape)
    shards = []
    for device in sharding.addressable_devices:
        ordinal = getattr(device, "local_hardware_id", None) or 0
        pool = native.HostPool(local, jnp.dtype(dtype).name, ordinal)
        shards.append(jax.dlpack.from_dlpack(pool, copy=False))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def beside(array: jax.Array) -> Sharding:
    """Where small arrays go that belong to `array` of one device: that device's own memory."""
    if isinstance(array.sharding, NamedSharding):
        return NamedSharding(array.sharding.mesh, PartitionSpec())
    return SingleDeviceSharding(next(iter(array.devices())))


def retype(array: jax.Array) -> jax.Array:
    """Gives an array in page-locked host memory its `<host>` type back, without a copy.

    The type is lost by `jax.dlpack.from_dlpack`, by `out_shardings=SingleDeviceSharding(...)` and
    by `.addressable_shards[i].data`. The result aliases `array`; keep only one of them.

    Raises:
      ValueError: `array` is not in host memory.
    """
    if (kind := array.sharding.memory_kind) != "pinned_host":
        raise ValueError(
            f'`array` should be in memory kind "pinned_host", but is in "{kind}". '
            "Move it with jax.device_put(array, jax.memory.Space.Host)."
        )
    sharding: Sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        mesh = Mesh(np.array(list(array.devices())), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def base_pointers(array: jax.Array) -> list[tuple[int, int]]:
    """(address, bytes) of every shard of `array` that this process can see."""
    return [
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for shard in array.addressable_shards
    ]
