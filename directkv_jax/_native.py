"""Loads the native modules and registers their XLA FFI targets. One module for each platform."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import jax

ATTEND = "directkv_attend"
APPEND = "directkv_append"
READ_PAGES = "directkv_read_pages"
WRITE_PAGES = "directkv_write_pages"
# Of the CUDA module alone.
QKV_ATTEND = "directkv_qkv_attend"
# The same, for `directkv_jax.bench`.
BENCH_MARK = "directkv_bench_mark"
BENCH_READ = "directkv_bench_read"
NAIVE_ATTEND = "directkv_naive_attend"

_MODULES = {"cpu": "directkv_jax._native_cpu", "cuda": "directkv_jax._native_cuda"}
_FFI_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}


@functools.cache
def load(platform: str) -> ModuleType | str:
    """The native module for "cpu" or "cuda" with its targets registered, or why there is none."""
    try:
        module = importlib.import_module(_MODULES[platform])
    except ModuleNotFoundError as error:
        if error.name != _MODULES[platform]:
            raise
        return f"this installation has no {platform} kernels. Build it again where a " + (
            "CUDA compiler (nvcc >= 12.8) is found." if platform == "cuda" else "C++ compiler is."
        )
    except ImportError as error:
        return f"the {platform} kernels could not be loaded: {error}"
    register(module, _FFI_PLATFORM[platform])
    return module


def register(module: ModuleType, ffi_platform: str) -> None:
    """Registers every handler of a native module under its target name."""
    for name, handler in module.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform=ffi_platform)
