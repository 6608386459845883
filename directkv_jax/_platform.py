"""Which platform a call is compiled for, and in which memory an array is typed to live."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device

_compile_only: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "directkv_compile_only", default=None
)


@contextlib.contextmanager
def compile_only(platform: str) -> Iterator[None]:
    """Traces for `platform` ("cuda" or "cpu") although no such device is here.

    For ahead-of-time compilation on a machine without a GPU; see `scripts/compile_check.py`.
    """
    token = _compile_only.set(platform)
    try:
        yield
    finally:
        _compile_only.reset(token)


def platform_of(array=None, mesh=None) -> str:
    """The platform of a concrete array, else of a mesh, else JAX's default: "cpu", "cuda", ..."""
    if (override := _compile_only.get()) is not None:
        return override
    if is_concrete(array):
        device = next(iter(array.devices()))
    elif mesh is not None and hasattr(mesh, "devices"):
        device = mesh.devices.flat[0]
    elif (device := default_device()) is None or isinstance(device, str):
        return _canonical(device or jax.default_backend(), None)
    return _canonical(device.platform, device)


def default_device() -> Any:
    """The device or platform name set by `jax.default_device`, or None."""
    return jax.config.jax_default_device  # type: ignore[attr-defined]


def _canonical(platform: str, device) -> str:
    if platform != "gpu":
        return platform
    version = (device or jax.devices()[0]).client.platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"


def compiling_ahead() -> bool:
    """Whether tracing is for a platform that need not be present."""
    return _compile_only.get() is not None


def is_concrete(x) -> bool:
    """Whether `x` is a JAX array with a value, not a tracer or an abstract shape."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def any_tracer(*trees) -> bool:
    """Whether a leaf is traced: errors can then only be raised about shapes, not about values."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def memory_space(x) -> Any:
    """The memory space in the type of `x`: `float32<host>[...]` is Host."""
    return jax.typeof(x).memory_space
