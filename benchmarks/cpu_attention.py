"""Decode attention of the CPU kernel: GB/s, share of this machine's read bandwidth, ratio to XLA.

The bound is memory: one decode step reads every cached key and value once and does about one
multiply-add per element and query head. So the figure of merit is bytes of KV over time, as a share
of what the same cores read with the same threads in the same run.

Each timed call reads another layer of a cache several times the last-level cache, all of it written
beforehand (untouched pages of a fresh mapping are one page of zeros, which caches well).

    python benchmarks/cpu_attention.py --output benchmarks/results
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import statistics
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import directkv_jax
from directkv_jax import _native
from directkv_jax.bench import record

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CACHES_OVER = 6  # the cache is this many last-level caches


def read_bandwidth(seconds: float = 2.0) -> dict[str, float]:
    """GB/s at which all cores read memory: the best of three reductions, each the best of its runs.

    A reduction with one instruction for 16 to 64 bytes and several accumulators is bound by memory
    on every core this was tried on; NumPy's run without the GIL. The best of several is taken, so
    that a slow one cannot flatter the kernel's share.
    """
    workers = len(os.sched_getaffinity(0))
    array = np.ones(max(1 << 28, CACHES_OVER * record.last_level_cache_bytes() // 4), np.float32)
    chunks = np.array_split(array, workers)
    reductions = {
        "dot": lambda chunk: np.dot(chunk, chunk),
        "add": np.add.reduce,
        "or": lambda chunk: np.bitwise_or.reduce(chunk.view(np.int32)),
    }
    best = {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for name, reduce in reductions.items():
            end, times = time.monotonic() + seconds, []
            while time.monotonic() < end or len(times) < 5:
                start = time.perf_counter()
                list(pool.map(reduce, chunks))
                times.append(time.perf_counter() - start)
            best[name] = array.nbytes / min(times) / 1e9
    return best


def filled_cache(length: int, dtype, layers: int) -> directkv_jax.KVCache:
    """A host cache with `length` random tokens in every layer and room for more."""
    cache = directkv_jax.KVCache.create(
        1, length + 64, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_layers=layers, dtype=dtype
    )
    keys = jax.random.split(jax.random.key(0), layers)
    for layer in range(layers):
        new = jax.random.normal(keys[layer], (2, 1, length, KV_HEADS, HEAD_DIM), dtype)
        cache = directkv_jax.append(cache, new[0], new[1], layer=layer)
    return cache.advance(length)


def step_times(cache, implementation: str, calls: int, repeats: int) -> list[float]:
    """Seconds of one attend: `repeats` means of `calls` calls, each to another layer."""

    @jax.jit
    def step(cache, query, key, value, layer):
        return directkv_jax.attend(
            query, cache, key, value, layer=layer, implementation=implementation
        )

    new = [
        jax.random.normal(jax.random.key(seed), (1, 1, heads, HEAD_DIM), cache.dtype)
        for seed, heads in enumerate((QUERY_HEADS, KV_HEADS, KV_HEADS))
    ]
    layers = [jnp.int32(layer) for layer in range(cache.num_layers)]
    step(cache, *new, layers[0]).block_until_ready()
    step(cache, *new, layers[-1]).block_until_ready()
    times, call = [], 0
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            step(cache, *new, layers[call % len(layers)]).block_until_ready()
            call += 1
        times.append((time.perf_counter() - start) / calls)
    return times


def measure(length: int, dtype, repeats: int) -> dict:
    """One row: the kernel and XLA on the same cache."""
    per_layer = 2 * length * KV_HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize
    layers = max(2, -(-CACHES_OVER * record.last_level_cache_bytes() // per_layer))
    cache = filled_cache(length, dtype, layers)
    cpu = step_times(cache, "cpu", layers, repeats)
    xla = step_times(cache, "xla", 2, max(3, repeats // 5))
    cache.delete()
    seconds, xla_seconds = statistics.median(cpu), statistics.median(xla)
    return {
        "S": length,
        "dtype": jnp.dtype(dtype).name,
        "kv_bytes_read": per_layer,
        "cache_bytes": per_layer * layers,
        "samples": repeats,
        "median_ms": round(seconds * 1e3, 3),
        "best_ms": round(min(cpu) * 1e3, 3),
        "gb_per_s": round(per_layer / seconds / 1e9, 2),
        "xla_median_ms": round(xla_seconds * 1e3, 3),
        "times_faster_than_xla": round(xla_seconds / seconds, 2),
    }


def main() -> None:
    """Measures, prints a table and, with --output, writes a JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", metavar="DIR", help="write a JSON there")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    native = _native.load("cpu")
    if isinstance(native, str):
        raise SystemExit(f"The CPU kernel is needed: {native}")
    before = read_bandwidth()
    cases = [(length, dtype) for dtype in options.dtypes for length in options.lengths]
    rows = [measure(length, dtype, options.repeats) for length, dtype in cases]
    # On a shared machine the bandwidth changes while this runs; the larger figure counts.
    bandwidth = {name: round(max(gbs, before[name]), 2) for name, gbs in read_bandwidth().items()}
    peak = max(bandwidth.values())
    for row in rows:
        row["share_of_read_bandwidth"] = round(row["gb_per_s"] / peak, 3)

    isa = native.isa_name()
    print(f"B=1 N={QUERY_HEADS} K={KV_HEADS} H={HEAD_DIM}, {isa}; memory reads at {peak} GB/s")
    columns = {
        "S": "S", "dtype": "dtype", "median ms": "median_ms", "GB/s": "gb_per_s",
        "share": "share_of_read_bandwidth", "XLA ms": "xla_median_ms",
        "x XLA": "times_faster_than_xla",
    }  # fmt: skip
    print("".join(f"{name:>11}" for name in columns))
    for row in rows:
        print("".join(f"{row[key]:>11}" for key in columns.values()))
    if options.output:
        result = {
            "benchmark": "cpu_attention",
            "shape": {"B": 1, "T": 1, "N": QUERY_HEADS, "K": KV_HEADS, "H": HEAD_DIM},
            "isa": isa,
            "read_bandwidth_gb_per_s": bandwidth,
            "rows": rows,
        }
        print(record.write(result, "cpu-attention", options.output))


if __name__ == "__main__":
    main()
