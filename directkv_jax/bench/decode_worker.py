"""One row of `directkv bench decode`, measured in this process.

Whole steps are timed by wall clock, from the call until the chosen token is there: with the device
memory peak that JAX keeps for a process, that is what a user of the step sees. The order matters
for the peak: the cache is filled, the step compiled, then the weights are made; the link and the
device memory, whose probes need memory of their own, are measured when the weights are freed.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import directkv_jax
from directkv_jax._platform import platform_of
from directkv_jax.bench import peaks, timing
from directkv_jax.bench.decode_caches import (
    OVERLAP,
    HbmCache,
    StagedCache,
    filled_pages,
    one_device,
)
from directkv_jax.bench.decode_cases import IN_HOST_MEMORY, Case
from directkv_jax.bench.decode_model import RandomModel
from directkv_jax.implementations import Request, choose

ERROR_LENGTH = 600


def main() -> int:
    """The process of one row: the case comes on stdin, the row goes to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends this process
    for index, fields in enumerate(json.load(sys.stdin)["cases"]):
        print(json.dumps({"index": index, "row": measure(Case(**fields))}), flush=True)
    return 0


def measure(case: Case) -> dict[str, Any]:
    """The row of `case`, with "peaks"; with "error" instead of figures if it does not run."""
    try:
        return _measure(case)
    except Exception as error:  # out of memory comes under many names; the run goes on
        return {**case.row(), "error": short(error)}


def short(error: Exception) -> str:
    """One line of the type and the beginning of the text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:ERROR_LENGTH]


def _measure(case: Case) -> dict[str, Any]:
    on_gpu = jax.default_backend() == "gpu"
    _say(case, "fills the cache")
    cache, sharding = _filled(case)
    model = RandomModel(case.config, sharding)
    tokens = jax.device_put(jnp.zeros((case.batch, 1), jnp.int32), sharding)
    finite = jax.device_put(jnp.ones((), bool), sharding)
    _say(case, "compiles")
    step, compiled, attention, notes = _compile(case, model, cache, (tokens, finite), on_gpu)
    _say(case, "makes the weights")
    weights = model.make_weights()
    _check_sizes(case, weights)
    _say(case, "steps")
    seconds, cache, finite = _time(case, step, weights, cache, tokens, finite)
    host_bytes, device_bytes = _cache_sizes(cache)
    row = {
        **case.row(),
        "implementation": attention,
        "ms_per_step": statistics.median(seconds) * 1e3,
        "ms_all": [round(s * 1e3, 4) for s in seconds],
        "tokens_per_s": case.batch / statistics.median(seconds),
        "hbm_peak_bytes": _hbm_peak(),
        "hbm_temp_bytes": compiled.memory_analysis().temp_size_in_bytes if on_gpu else None,
        "host_bytes": host_bytes,
        "kv_bytes_device": device_bytes,
        "finite_logits": finite,
    }
    if not on_gpu:
        notes.append("device memory: this backend keeps no statistics of it")
    for array in weights:
        array.delete()
    _say(case, "measures the peaks")
    measured = _peaks(case, cache, notes)
    ratios = against(case, row["ms_per_step"], measured)
    return {**row, **ratios, "notes": notes, "peaks": measured}


def _filled(case: Case):
    """(the filled cache, the sharding of the small arrays beside it)."""
    config = case.config
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    layers = config["num_hidden_layers"]
    if case.placement in ("host", "device"):
        cache = directkv_jax.KVCache.create(
            case.batch, case.capacity, num_kv_heads=heads, head_dim=dim, num_layers=layers,
            placement=case.placement,
        )  # fmt: skip
        beside = directkv_jax.memory.beside(cache.pages)
        return jax.block_until_ready(filled_pages(cache, case.length)), beside
    kind: Any = StagedCache if case.placement == "staged" else HbmCache
    # A size that attention kernels like; the staged copy carries the few tokens too many.
    capacity = -(-case.capacity // 16) * 16
    cache = kind.filled(layers, case.batch, case.length, capacity, heads, dim)
    return jax.block_until_ready(cache), one_device("device")


def _compile(case: Case, model: RandomModel, cache, carried, on_gpu: bool):
    """(the jitted step, its compiled form, whose attention, notes).

    The jitted step itself is called later: it finds the compiled form by its arguments.
    """
    if case.placement in ("host", "device"):
        step = model.step(None, None)
        return step, step.lower(model.abstract_weights, cache, *carried).compile(), _ours(cache), []
    candidates = [case.attention]
    if case.attention == "auto":
        candidates = ["cudnn", "xla"] if on_gpu else ["xla"]
    notes: list[str] = []
    for attention in candidates:
        options = OVERLAP if case.placement == "staged" and on_gpu else None
        step = model.step(attention, options)
        try:
            compiled = step.lower(model.abstract_weights, cache, *carried).compile()
        except Exception as error:
            if attention == candidates[-1]:
                raise
            notes.append(f"attention {attention} does not compile: {short(error)}")
            continue
        return step, compiled, f"jax.nn.dot_product_attention {attention}", notes
    raise AssertionError("no candidate")


def _ours(cache) -> str:
    """Which implementation `decode_attention` chooses; the heads do not change it."""
    platform = platform_of(cache.pages)
    heads = cache.num_kv_heads
    request = Request(platform, cache.placement, cache.dtype, cache.head_dim, heads, heads)
    return choose(None, request).name


def _time(case: Case, step, weights, cache, tokens, finite):
    """(seconds of each timed step, the cache, whether all logits of all steps were finite)."""
    seconds = []
    for _ in range(case.warmup + case.steps):
        start = time.perf_counter()
        cache, tokens, finite = step(weights, cache, tokens, finite)
        tokens.block_until_ready()
        seconds.append(time.perf_counter() - start)
    lengths = jax.device_get(cache.lengths).tolist()
    if lengths != [case.capacity] * case.batch:
        raise RuntimeError(f"the rows should hold {case.capacity} tokens, but hold {lengths}")
    return seconds[case.warmup :], cache, bool(finite)


def against(case: Case, ms: float, measured: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row that compare it with the peaks; None where a peak is unknown.

    The bound is the sum of two times: the cached keys and values at the peak of the memory they lie
    in (host memory: that of a zero-copy read over the link), the weights at that of device memory.
    """
    hosted = case.placement in IN_HOST_MEMORY
    link = measured.get("zero_copy", {}).get("gb_per_s")
    hbm = measured.get("hbm_read", {}).get("gb_per_s")
    crosses = hosted and jax.default_backend() == "gpu"
    rate = case.kv_bytes / (ms * 1e6) if crosses else None
    source = link if hosted else hbm
    bound = None
    if source and hbm:
        bound = case.kv_bytes / (source * 1e6) + case.weight_bytes / (hbm * 1e6)
    return {
        "link_gb_per_s": rate,
        "share_of_zero_copy_peak": rate / link if rate and link else None,
        "bound_ms": bound,
        "ratio_to_bound": ms / bound if bound else None,
    }


def _peaks(case: Case, cache, notes: list[str]) -> dict[str, Any]:
    """What link and device memory can do at best. The link is read where the cache lies."""
    if not timing.on_cuda():
        notes.append("peaks: no CUDA device, so there is no link and no HBM to compare with")
        delete(cache)
        return {}
    found: dict[str, Any] = {}
    probes: list[tuple[str, Callable[[], Any]]] = [("hbm_read", peaks.hbm_read)]
    if case.placement in IN_HOST_MEMORY:
        data = cache.pages if case.placement == "host" else cache.keys[0]
        nbytes = min(data.nbytes, peaks.LARGEST_YARDSTICK_BYTES)
        found["zero_copy"] = _probe(
            "zero_copy", notes, lambda: peaks.read_gb_per_s(data, nbytes, peaks.HOST_CTAS)
        )
        probes.append(("copy_engine_gb_per_s", peaks.copy_engine_gb_per_s))
    delete(cache)
    for name, probe in probes:
        found[name] = _probe(name, notes, probe)
    return {name: value for name, value in found.items() if value is not None}


def _probe(name: str, notes: list[str], probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # e.g. no room for it under --hbm-limit
        notes.append(f"peak {name} is not measured: {short(error)}")
        return None


def delete(cache) -> None:
    """Frees the memory of a cache at once."""
    if isinstance(cache, directkv_jax.KVCache):
        cache.delete()
    else:
        for array in jax.tree.leaves(cache):
            array.delete()


def _check_sizes(case: Case, weights) -> None:
    found = sum(array.nbytes for array in weights)
    if found != case.parameter_bytes:
        raise AssertionError(f"{found} bytes of weights, {case.parameter_bytes} were counted")


def _cache_sizes(cache) -> tuple[int, int]:
    if isinstance(cache, directkv_jax.KVCache):
        return cache.host_bytes, cache.device_bytes
    return cache.sizes


def _hbm_peak() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def _say(case: Case, what: str) -> None:
    print(f"{case.label}: {what}", file=sys.stderr)
