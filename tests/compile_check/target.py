"""The GPU that is not here: a compile-only mesh, abstract arrays in its memories, FFI targets."""

from __future__ import annotations

import contextlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import directkv_jax
from directkv_jax import _native, _platform, models
from directkv_jax._sharding import CacheSpecs

CONFIG = Path(__file__).parents[1] / "data" / "h200_target_config.pbtxt"
TARGETS = (
    _native.ATTEND, _native.QKV_ATTEND, _native.APPEND, _native.READ_PAGES, _native.WRITE_PAGES
)  # fmt: skip
PLUGIN = "jax_cuda13_plugin"
REPLICATED = PartitionSpec()

# Fields of the target description that plugins before 0.11 refuse.
_NEW_FIELDS = {
    "collective_memory_granularity",
    "max_blocks_per_multiprocessor",
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
}


def missing() -> str | None:
    """What the check lacks on this machine, or None."""
    if importlib.util.find_spec(PLUGIN) is None:
        wheel = f"jax-cuda13-plugin=={jax.__version__}"
        return f"needs the wheels {wheel} and jax-cuda13-pjrt (no GPU, no NVIDIA library)"
    return None


def plugin_version() -> tuple[int, ...]:
    """Of the XLA that compiles; () where there is none."""
    try:
        return tuple(map(int, version("jax-cuda13-pjrt").split(".")[:3]))
    except PackageNotFoundError:
        return ()


def register_handlers() -> str:
    """Registers handlers for the targets on platform CUDA; returns whose they are.

    XLA asks at compile time only that they exist, and for their traits. Without a CUDA build the
    CPU handlers stand in: the same names, operands and results. That of attend stands in for the
    fused call, which the CPU has not.
    """
    if not isinstance(_native.load("cuda"), str):
        return "the CUDA module's handlers"
    module = _native.load("cpu")
    if isinstance(module, str):
        raise RuntimeError(f"No native module is built: {module}")
    _native.register(module, "CUDA")
    attend = module.registrations()[_native.ATTEND]
    jax.ffi.register_ffi_target(_native.QKV_ATTEND, attend, platform="CUDA")
    return "the CPU module's handlers as stand-ins (no CUDA build here)"


def h200(shape: tuple[int, ...] = (1,), axes: tuple[str, ...] = ("device",)) -> Mesh:
    """A mesh of H200s that can be compiled for and nothing else."""
    lines = CONFIG.read_text().splitlines()
    if plugin_version() < (0, 11):
        lines = [line for line in lines if line.split(":")[0].strip() not in _NEW_FIELDS]
    topology = topologies.get_topology_desc(
        "gpu",
        platform="cuda",
        target_config="\n".join(lines),
        topology=f"1x1x{int(np.prod(shape))}",  # slices x hosts x GPUs
    )
    return Mesh(np.array(topology.devices).reshape(shape), axes)


@contextlib.contextmanager
def tracing_for_cuda():
    """directkv_jax chooses and traces as if CUDA were the backend."""
    with _platform.compile_only("cuda"):
        yield


def array(mesh: Mesh, shape, dtype=jnp.bfloat16, spec=REPLICATED, host=False):
    """An abstract array; terabytes of it cost nothing.

    Host memory takes the abstract mesh: a compile-only one drops `memory_kind` without a word.
    """
    sharding = NamedSharding(mesh, spec)
    if host:
        sharding = NamedSharding(mesh.abstract_mesh, spec, memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def on_device(mesh: Mesh, tree):
    """The leaves of `tree` as abstract arrays in device memory, whole on every GPU."""
    return jax.tree.map(lambda x: array(mesh, x.shape, x.dtype), tree)


def empty_cache(devices: Mesh, batch: int, max_length: int, **options) -> directkv_jax.KVCache:
    """`KVCache.create` of these arguments, abstract, with every leaf in its place."""
    with tracing_for_cuda():
        shape = jax.eval_shape(lambda: directkv_jax.KVCache.create(batch, max_length, **options))
    return place(devices, shape)


def place(devices: Mesh, cache):
    """An abstract cache with every leaf where a real one would be: `pages` on the host."""
    if isinstance(cache, models.ModelCache):
        return models.ModelCache(tuple(place(devices, part) for part in cache.parts))
    specs = CacheSpecs(cache.batch_axis, cache.kv_head_axis)

    def like(x, spec, host=False):
        return array(devices, x.shape, x.dtype, spec, host)

    return cache.replace(
        pages=like(cache.pages, specs.pages, host=cache.placement == "host"),
        page_table=like(cache.page_table, specs.page_table),
        lengths=like(cache.lengths, specs.lengths),
        overflowed=like(cache.overflowed, specs.lengths),
        written=None if cache.written is None else like(cache.written, specs.lengths),
        tracked=True,
    )
