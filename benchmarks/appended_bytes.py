"""Bytes that a decode step writes to a host cache, counted by the GPU through Nsight Compute.

    python benchmarks/appended_bytes.py --batch 1 8 --output benchmarks/results

A program of several layers, `qkv_attention` each, runs once under ncu. Every kernel of this library
in it is listed with the bytes it wrote to host memory; together they are to be 2 K H itemsize for
each layer and row, and nothing else.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys

import jax
import jax.numpy as jnp

from directkv_jax import KVCache, QKVProjection, RoPE, qkv_attention
from directkv_jax.bench import counters, record

METRIC = "lts__t_sectors_srcunit_tex_aperture_sysmem_op_write.sum"  # of the SMs
KERNEL_NAMES = ("append", "merge", "project", "attend")
KERNELS = "regex:" + "|".join(KERNEL_NAMES)
WIDTH, GROUP = 1024, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=1000, help="tokens cached before")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--worker", action="store_true", help="run the step; for ncu")
    parser.add_argument("--output", metavar="DIR", help="of the record")
    options = parser.parse_args()
    if options.worker:
        for batch in options.batch:
            step(batch, options)
        return
    rows = [measure(batch, options) for batch in options.batch]
    result = {
        **record.stamp(), "benchmark": "appended_bytes", "metric": METRIC,
        "command": record.command("python benchmarks/appended_bytes.py"), "rows": rows,
    }  # fmt: skip
    if options.output:
        print(record.write(result, f"{record.gpu_slug()}-appended-bytes", options.output))


def step(batch: int, options) -> None:
    """One decode step of every layer."""
    heads, width = options.kv_heads, options.head_dim
    cache = KVCache.create(
        batch, options.length + 1, num_kv_heads=heads, head_dim=width, num_layers=options.layers
    )
    cache = cache.replace(lengths=jnp.full_like(cache.lengths, options.length))
    kernel = jnp.full((WIDTH, heads, GROUP + 2, width), 1 / WIDTH, jnp.bfloat16)
    rope = RoPE.create(width)

    def program(x, kernel, cache):
        for layer in range(options.layers):
            out, cache = qkv_attention(x, QKVProjection(kernel), cache, layer=layer, rope=rope)
            x = x + out.reshape(batch, 1, -1)[..., :WIDTH]
        return x, cache

    x = jnp.ones((batch, 1, WIDTH), jnp.bfloat16)
    out, cache = jax.jit(program, donate_argnums=2)(x, kernel, cache)
    jax.block_until_ready((out, cache.pages))


def measure(batch: int, options) -> dict:
    """The row of one batch size."""
    worker = [
        sys.executable, "-P", os.path.abspath(__file__), "--worker", "--batch", str(batch),
        "--length", str(options.length), "--layers", str(options.layers),
        "--kv-heads", str(options.kv_heads), "--head-dim", str(options.head_dim),
    ]  # fmt: skip
    done = counters.profile(worker, METRIC, KERNELS)
    written: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    for kernel, sectors in counters.parse(done.stdout, METRIC):
        name = next(word for word in KERNEL_NAMES if word in kernel)
        written[name] += sectors * counters.SECTOR_BYTES
        launches[name] += 1
    if not launches:
        sys.exit(f"appended_bytes.py: ncu reported no kernel: {(done.stdout + done.stderr)[-500:]}")
    row = {
        "batch": batch, "length": options.length, "layers": options.layers,
        "num_kv_heads": options.kv_heads, "head_dim": options.head_dim, "dtype": "bfloat16",
        "launches": dict(launches), "host_bytes_written": dict(written),
        "total": sum(written.values()),
        "expected": 2 * 2 * options.kv_heads * options.head_dim * batch * options.layers,
    }  # fmt: skip
    print(json.dumps(row))
    return row


if __name__ == "__main__":
    main()
