"""The bulk append of a prompt's layer to a host cache, against a copy of as many bytes.

    python benchmarks/bulk_append.py --length 32768 --output benchmarks/results

The peak is that of the copy engine from the device to page-locked host memory, in the same run.
"""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp

import directkv_jax
from directkv_jax.bench import record, timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", metavar="DIR", help="of the record")
    options = parser.parse_args()
    rows = [measure(length, options) for length in options.length]
    result = {
        **record.stamp(), "benchmark": "bulk_append",
        "command": record.command("python benchmarks/bulk_append.py"), "rows": rows,
    }  # fmt: skip
    if options.output:
        print(record.write(result, f"{record.gpu_slug()}-bulk-append", options.output))


def measure(length: int, options) -> dict:
    """The row of one length, of one row and layer."""
    shape = (1, length, options.kv_heads, options.head_dim)
    key, value = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
    cache = directkv_jax.KVCache.create(
        1, length, num_kv_heads=options.kv_heads, head_dim=options.head_dim
    )

    def append(key, cache, value):
        return key, directkv_jax.append(cache, key, value, after=key)

    program = jax.jit(_until_written(append), donate_argnums=1)
    nbytes = 2 * key.nbytes

    def appended():
        nonlocal cache
        out, cache = program(key, cache, value)
        return out

    append_us = timing.median(timing.times_us(appended, options.repeats))
    cache.delete()

    def copy(key, value):
        return key, jax.device_put((key, value), jax.memory.Space.Host)

    copies = jax.jit(_until_written(copy))
    copy_us = timing.median(timing.times_us(lambda: copies(key, value)[0], options.repeats))
    row = {
        "length": length, "bytes": nbytes, "append_us": round(append_us, 2),
        "append_gb_per_s": round(nbytes / append_us / 1e3, 2),
        "copy_engine_gb_per_s": round(nbytes / copy_us / 1e3, 2),
        "share_of_copy_engine": round(copy_us / append_us, 4),
    }  # fmt: skip
    print(json.dumps(row))
    return row


def _until_written(function):
    """Marks around `function`; the end is marked when both of its results are there."""
    if not timing.on_cuda():
        return function

    def marked(x, *rest):
        out, written = function(timing.mark(x, timing.BEGIN, timing.SPIN_US), *rest)
        out, written = jax.lax.optimization_barrier((out, written))
        return timing.mark(out, timing.END), written

    return marked


if __name__ == "__main__":
    main()
