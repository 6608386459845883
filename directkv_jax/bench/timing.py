"""How long a compiled program takes: device events on CUDA, wall clock elsewhere.

On CUDA the two marks are part of the program itself, before and after what is timed. The first one
keeps the device busy for a while, so that everything behind it is queued before the clock starts:
the time is that of the kernels, free of launch latency.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from directkv_jax import _native, _platform

BEGIN, END = 0, 1  # slots of the marks
SPIN_US = 300  # longer than the host takes to enqueue one call with all around it
SPIN_US_PER_CALL = 60  # and each further one of the same program
WARMUPS = 2


def on_cuda() -> bool:
    """Whether programs run on CUDA here, and are timed by marks."""
    return _platform.platform_of() == "cuda"


def native():
    """The CUDA module, its FFI targets registered.

    Raises:
      NotImplementedError: it is not there; says why.
    """
    module = _native.load("cuda")
    if isinstance(module, str):
        raise NotImplementedError(f"This benchmark needs the CUDA build of directkv_jax: {module}")
    return module


def mark(x, slot: int, wait_us: int = 0):
    """`x` itself, in place; sets the device mark `slot` when it exists, after `wait_us` of waiting.

    What reads the result runs after the mark.
    """
    native()
    call = jax.ffi.ffi_call(_native.BENCH_MARK, jax.typeof(x), input_output_aliases={0: 0})
    return call(x, slot=np.int32(slot), spin_us=np.int32(wait_us))


def spin_us(calls: int) -> int:
    """Microseconds of waiting that hide the launches of a program of `calls` attention calls."""
    return SPIN_US + SPIN_US_PER_CALL * (calls - 1)


def between_marks(function: Callable[..., Any], wait_us: int = SPIN_US) -> Callable[..., Any]:
    """`function(x, *rest)` with a mark on `x` before it and one on its (first) result after it.

    Whatever `function` does with `rest` alone may run before the first mark, unless it takes it
    from `after`. Without CUDA, `function` unchanged.
    """
    if not on_cuda():
        return function

    def marked(x, *rest):
        result = function(mark(x, BEGIN, wait_us), *rest)
        if isinstance(result, tuple):
            return (mark(result[0], END), *result[1:])
        return mark(result, END)

    return marked


def after(x, *rest):
    """`(x, *rest)`, none of which XLA uses before `x` is there; works for host arrays too."""
    return jax.lax.optimization_barrier((x, *rest))


def times_us(call: Callable[[], Any], repeats: int, warmups: int = WARMUPS) -> list[float]:
    """Microseconds of `repeats` calls, after `warmups` that do not count.

    Args:
      call: runs a program made of `between_marks` and returns its results.
      repeats: how many times count.
      warmups: how many come first.
    """
    return [time_us(call) for _ in range(warmups + repeats)][warmups:]


def time_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call, see `times_us`."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    elapsed = time.perf_counter() - start
    if on_cuda():
        return native().bench_elapsed_ms(BEGIN, END) * 1e3
    return elapsed * 1e6


def median(times: list[float]) -> float:
    """The median, of which every figure is made."""
    return statistics.median(times)
