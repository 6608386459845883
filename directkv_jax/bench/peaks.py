"""What the link and the memory can do at best, measured in the run that is compared with it.

The yardstick is a plain read by the SMs: 16 bytes per lane, 8 loads in flight, no arithmetic. For
host memory it is the zero-copy peak, for device memory the HBM peak. The copy engine is given too:
it is what staging can reach, a little more than the SMs can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax import _native, memory
from directkv_jax.bench import timing

# Thread blocks of the plain read; the best of them counts. Host: 8 fill a PCIe 5 link, NVLink-C2C
# takes several times that. Device: whole waves of 4 blocks per SM on 132 SMs, and other sizes.
HOST_CTAS = (8, 16, 32, 132)
DEVICE_CTAS = (264, 528, 1056)
COPY_BYTES = 1 << 30
# A case that reads more is compared with a read of this many bytes: its start and tail are nothing.
LARGEST_YARDSTICK_BYTES = 2 << 30
HBM_BYTES = 4 << 30


def _read(after, data, *, nbytes: int, ctas: int):
    """uint32 `[ctas]`, checksums of a plain read of the first `nbytes` of `data`, after `after`."""
    timing.native()
    call = jax.ffi.ffi_call(_native.BENCH_READ, jax.ShapeDtypeStruct((ctas,), jnp.uint32))
    return call(data, after, bytes=np.int64(nbytes))


def read_gb_per_s(data, nbytes: int, candidates, repeats: int = 5) -> dict[str, Any]:
    """The plain read of the first `nbytes` of `data` (host or device memory), best of `candidates`.

    Returns:
      bytes, ctas of the best, gb_per_s of it, and by_ctas with all.
    """
    nbytes = nbytes // 16 * 16
    by_ctas = {}
    x = jnp.zeros((1,), jnp.uint32)
    for ctas in candidates:
        program = jax.jit(timing.between_marks(functools.partial(_read, nbytes=nbytes, ctas=ctas)))
        times = timing.times_us(functools.partial(program, x, data), repeats)
        by_ctas[ctas] = nbytes / timing.median(times) / 1e3
    best = max(by_ctas, key=by_ctas.__getitem__)
    return {
        "bytes": nbytes,
        "ctas": best,
        "gb_per_s": round(by_ctas[best], 2),
        "by_ctas": {str(ctas): round(rate, 2) for ctas, rate in by_ctas.items()},
    }


def copy_engine_gb_per_s(nbytes: int = COPY_BYTES, repeats: int = 5) -> float:
    """GB/s of a copy of page-locked host memory to the device."""
    host = memory.allocate((nbytes // 4,), jnp.float32, "host")

    def copy(x, host):
        x, host = timing.after(x, host)
        return jax.device_put(host, jax.memory.Space.Device), x

    program, x = jax.jit(timing.between_marks(copy)), jnp.zeros((1,))
    times = timing.times_us(lambda: program(x, host), repeats)
    host.delete()
    return round(nbytes / timing.median(times) / 1e3, 2)


def hbm_read(nbytes: int = HBM_BYTES) -> dict[str, Any]:
    """The plain read of device memory; `read_gb_per_s` of a buffer far larger than the L2."""
    data = jnp.ones((nbytes // 4,), jnp.uint32)
    result = read_gb_per_s(data, nbytes, DEVICE_CTAS)
    data.delete()
    return result


def measure(placement: str) -> dict[str, Any]:
    """The peaks that rows of `placement` are compared with; each null where there is none."""
    if not timing.on_cuda():
        return {"reason": "no CUDA device: there is no link and no HBM to compare with"}
    if placement == "device":
        return {"hbm_read": hbm_read()}
    return {"copy_engine_gb_per_s": copy_engine_gb_per_s()}


class ZeroCopyYardstick:
    """The plain read of just as many bytes as a case reads, timed in turns with the case.

    A small case is thus compared with a read that has the same start and the same tail, and what
    else uses the link for a while slows both.
    """

    def __init__(self) -> None:
        self.by_bytes: dict[int, dict[str, Any]] = {}

    def reader(self, data, nbytes: int) -> tuple[Callable[[], Any], int] | None:
        """(a call that reads host memory `data`, the bytes it reads); None without CUDA.

        With as many thread blocks as were best for that size, found once for each.
        """
        if not timing.on_cuda():
            return None
        nbytes = min(nbytes, LARGEST_YARDSTICK_BYTES, data.nbytes) // 16 * 16
        if nbytes not in self.by_bytes:
            self.by_bytes[nbytes] = read_gb_per_s(data, nbytes, HOST_CTAS)
        read = functools.partial(_read, nbytes=nbytes, ctas=self.by_bytes[nbytes]["ctas"])
        program, x = jax.jit(timing.between_marks(read)), jnp.zeros((1,), jnp.uint32)
        jax.block_until_ready(program(x, data))
        return lambda: program(x, data), nbytes
