"""Runs one case of `directkv bench decode` in a process of its own, with its limits of memory.

JAX fixes the limits when it starts and cannot reset its peak: hence one process for each row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from directkv_jax.bench import workers
from directkv_jax.bench.decode_cases import Case
from directkv_jax.cli.limits import pinned_memory_limits

# A row says nothing until it is done. Most of it is compiling the step and filling the cache.
TIMEOUT_S = 900.0


def run_case(case: Case, device_bytes: int | None) -> dict[str, Any]:
    """The row of `case`, with "error" if its process does not bring one.

    Args:
      case: what to measure.
      device_bytes: all memory of the GPU, which a limit is a fraction of.
    """
    command, order = ["bench", "decode", "--worker"], [dataclasses.asdict(case)]
    env = environment(case, device_bytes)
    message = next(workers.run_cases(command, order, {}, env, TIMEOUT_S))
    if "error" in message:
        return {**case.row(), "error": message["error"]}
    return message["row"]


def environment(case: Case, device_bytes: int | None) -> dict[str, str]:
    """Variables for the process: device memory on demand, or no more than a limit.

    Raises:
      ValueError: the limit is not below the memory of the GPU, or there is no GPU.
    """
    # The limit has two names, which JAX refuses together; an empty one counts as unset.
    values = {"XLA_CLIENT_MEM_FRACTION": "", "XLA_PYTHON_CLIENT_MEM_FRACTION": ""}
    values["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if case.hbm_limit_gb is not None:
        limit = case.hbm_limit_gb * 1e9
        if not device_bytes or not 0 < limit < device_bytes:
            has = f"{device_bytes / 1e9:.1f} GB" if device_bytes else "no NVIDIA GPU"
            raise ValueError(
                f"`--hbm-limit` should be below the memory of the GPU, but got "
                f"{case.hbm_limit_gb:g} GB, and this machine has {has}."
            )
        values["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
        values["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{limit / device_bytes:.6f}"
    if case.placement == "staged":
        # XLA's pool of page-locked memory ends at 64 GiB unless told otherwise.
        values["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] = str(max(1, usable_host_bytes() >> 30))
    return values


def usable_host_bytes() -> int:
    """Host memory a cache may take here: three quarters of the smallest limit that is known."""
    limits = pinned_memory_limits()
    known = [limits[name] for name in ("total", "available", "cgroup")]
    return min((value for value in known if value), default=64 << 30) * 3 // 4
