"""`directkv info`: what this machine and this installation can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp

import directkv_jax
from directkv_jax import memory
from directkv_jax.cli.limits import pinned_memory_limits

# The shape that is asked about: Llama 3 8B.
_SHAPE = {"dtype": jnp.bfloat16, "head_dim": 128, "num_query_heads": 32, "num_kv_heads": 8}
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors", "gguf")
# Of two copies: the difference of their times is that of 128 MiB, without what any copy takes.
_LINK_BYTES = (32 << 20, 160 << 20)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    report = collect()
    print(json.dumps(report) if arguments.json else "\n".join(_lines(report)))
    return 0


def collect() -> dict[str, Any]:
    """Everything as one JSON-able mapping. Bytes are ints, bandwidths bytes per second."""
    return {
        "versions": _versions(),
        "platform": jax.default_backend(),
        "machine": platform.machine(),
        "devices": [
            {
                "device": str(device),
                "kind": device.device_kind,
                "memories": sorted(space.kind for space in device.addressable_memories()),
            }
            for device in jax.local_devices()
        ],
        "implementations": {
            name: {
                placement: directkv_jax.unsupported_reason(name, placement=placement, **_SHAPE)
                for placement in memory.PLACEMENTS
            }
            for name in directkv_jax.implementations
        },
        "pinned_memory": pinned_memory_limits(),
        "link_bytes_per_s": link_bandwidth() if jax.default_backend() == "gpu" else None,
    }


def link_bandwidth(repeats: int = 5) -> float:
    """Bytes per second at which the copy engine reads page-locked memory, starting cost apart."""
    copy = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))
    best = []
    for nbytes in _LINK_BYTES:
        host = memory.allocate((nbytes // 4,), jnp.float32, "host")
        copy(host).block_until_ready()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            copy(host).block_until_ready()
            times.append(time.perf_counter() - start)
        host.delete()
        best.append(min(times))
    return (_LINK_BYTES[1] - _LINK_BYTES[0]) / (best[1] - best[0])


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "directkv_jax": directkv_jax.__version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _lines(report: dict[str, Any]):
    known = report["versions"].items()
    yield "versions         " + ", ".join(f"{name} {value or '-'}" for name, value in known)
    yield f"platform         {report['platform']} on {report['machine']}"
    for device in report["devices"]:
        yield f"device           {device['device']} ({device['kind']})"
        yield f"  memory kinds   {', '.join(device['memories'])}"
    for name, reasons in report["implementations"].items():
        for placement, reason in reasons.items():
            yield f"{name:<10}{placement:<7}{'available' if reason is None else 'no: ' + reason}"
    yield "page-locked memory"
    for name, value in report["pinned_memory"].items():
        yield f"  {name:<15}{'-' if value is None else f'{value / 2**30:.2f} GiB'}"
    link = report["link_bytes_per_s"]
    yield f"host to device   {'no GPU' if link is None else f'{link / 1e9:.1f} GB/s'}"
