"""Shared fixtures: virtual devices, strict numerics, and the implementations a test runs over."""

from __future__ import annotations

import importlib.metadata
import os

# Before JAX starts: sharding is tested on four virtual CPU devices, and for a GPU XLA does not
# search for the fastest matrix products, which takes it a minute for a float32 model.
_FLAGS = [
    "xla_force_host_platform_device_count=4",
    "xla_gpu_autotune_level=0",
    "xla_cpu_parallel_codegen_split_count=1",  # each worker has a core
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # XLA's older emitters, gone since, compile faster.
    _FLAGS.append("xla_cpu_use_fusion_emitters=false")
for _flag in _FLAGS:
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_flag}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

import directkv_jax  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def short_compilation():
    """What a test compiles runs once or twice: on a CPU, optimizing it takes longer than it saves.

    For GPUs programs are compiled as a user's are; in the processes that tests start too, but for
    the flags above.
    """
    if jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def strict_numerics():
    """No implicit rank promotion, and float32 that is float32 (no TF32) where results compare."""
    saved = jax.config.jax_numpy_rank_promotion, jax.config.jax_default_matmul_precision
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_numpy_rank_promotion", saved[0])
    jax.config.update("jax_default_matmul_precision", saved[1])


@pytest.fixture(params=("cpu", "xla", "reference", "cuda"))
def implementation(request) -> str:
    """Every implementation; skipped, with its own reason, where it does not run."""
    return _or_skip(request.param)


@pytest.fixture(params=("cpu", "cuda"))
def native(request) -> str:
    """The implementations that are our kernels: what is promised of XLA's calls holds for them."""
    return _or_skip(request.param)


def _or_skip(name: str) -> str:
    if reason := directkv_jax.unsupported_reason(name):
        pytest.skip(f'implementation="{name}": {reason}')
    return name


_compiled = 0


def _on_event(name: str, *_, **__) -> None:
    global _compiled
    _compiled += name.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_on_event)


@pytest.fixture(scope="session")
def compilations():
    """A function that says how many programs XLA has compiled so far in this process."""
    return lambda: _compiled


@pytest.fixture
def four_devices() -> list[jax.Device]:
    """Four devices of the default platform."""
    if len(devices := jax.devices()) < 4:
        pytest.skip(f"needs 4 devices, and JAX sees {len(devices)} of {devices[0].platform}")
    return devices[:4]
