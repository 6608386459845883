"""Fills a big host cache, attends to all of it, and prints what that cost in device memory.

    python measure_big_cache.py GIB

Every chunk of tokens is the same, so the exact result is known from one chunk: attention over n
copies of a chunk gives the output of the chunk, and a log-sum-exp larger by log(n).
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import directkv_jax

LAYERS, BATCH, QUERY_HEADS, KV_HEADS, HEAD_DIM, CHUNK = 4, 2, 32, 8, 128, 1024


def peak() -> int:
    """Bytes of device memory at the worst moment so far."""
    return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]


def resident() -> int:
    """Bytes of host memory this process holds."""
    status = Path("/proc/self/status").read_text()
    found = re.findall(r"^(?:VmRSS|HugetlbPages):\s*(\d+) kB", status, re.M)
    return 1024 * sum(map(int, found))


def timed(what):
    """(result, seconds)."""
    start = time.perf_counter()
    result = jax.block_until_ready(what())
    return result, time.perf_counter() - start


@functools.partial(jax.jit, donate_argnums=0)
def fill(cache, key, value):
    """Appends one chunk to every layer."""
    for layer in range(cache.num_layers):
        cache = directkv_jax.append(cache, key, value, layer=layer)
    return cache.advance(CHUNK)


@jax.jit
def read(cache, query, layer):
    """Attends to everything in one layer."""
    return directkv_jax.attend(query, cache, layer=layer, return_residual=True)


def expected(query, key, value):
    """(out, lse) over one chunk, in float32 on the host."""
    query, key, value = (np.asarray(x, np.float32) for x in (query, key, value))
    key, value = (np.repeat(x, QUERY_HEADS // KV_HEADS, axis=2) for x in (key, value))
    logits = np.einsum("btnh,bsnh->btns", query, key) / math.sqrt(HEAD_DIM)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("btns,bsnh->btnh", weights / total, value), (top + np.log(total))[..., 0]


def main(gib: float) -> dict:
    token_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    chunks = int(gib * 2**30) // (BATCH * token_bytes * CHUNK)
    random = [
        jax.random.normal(jax.random.key(seed), (BATCH, count, heads, HEAD_DIM), jnp.bfloat16)
        for seed, (count, heads) in enumerate(
            ((1, QUERY_HEADS), (CHUNK, KV_HEADS), (CHUNK, KV_HEADS))
        )
    ]
    query, key, value = jax.block_until_ready(random)
    options = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_layers": LAYERS}
    # XLA takes 80 MiB of scratch while it compiles, whatever the program. A small cache through the
    # same functions puts that into the peak before the big one is made.
    small = fill(directkv_jax.KVCache.create(BATCH, CHUNK, **options), key, value)
    jax.block_until_ready(read(small, query, 0))
    small.delete()
    held_before, before = resident(), peak()

    start = time.perf_counter()
    cache = directkv_jax.KVCache.create(BATCH, chunks * CHUNK, **options)
    create_s = time.perf_counter() - start
    pointers, nbytes = directkv_jax.memory.base_pointers(cache.pages), cache.nbytes
    kind = cache.pages.sharding.memory_kind
    cache, _ = timed(lambda: fill(cache, key, value))  # compiles

    def fill_up():
        held = cache
        for _ in range(chunks - 1):
            held = fill(held, key, value)
        return held

    cache, append_s = timed(fill_up)
    timed(lambda: read(cache, query, 0))  # compiles
    (out, lse), attend_s = timed(lambda: read(cache, query, LAYERS - 1))
    after = peak()

    want, want_lse = expected(query, key, value)
    in_place = directkv_jax.memory.base_pointers(cache.pages) == pointers
    full = bool((np.asarray(cache.lengths) == chunks * CHUNK).all())
    held = resident() - held_before
    cache.delete()
    return {
        "cache_bytes": nbytes,
        "tokens_per_row": chunks * CHUNK,
        "memory_kind": kind,
        "pointer_kind": "host (asserted by every call's handler)",
        "in_place": in_place,
        "full": full,
        "hbm_peak_before_bytes": before,
        "hbm_peak_growth_bytes": after - before,
        "create_s": round(create_s, 2),
        "append_gb_per_s": round(nbytes * (chunks - 1) / chunks / append_s / 1e9, 1),
        "attend_gb_per_s": round(nbytes / LAYERS / attend_s / 1e9, 1),
        "max_out_error": float(np.abs(np.asarray(out, np.float32) - want).max()),
        "max_lse_error": float(np.abs(np.asarray(lse) - want_lse - math.log(chunks)).max()),
        "resident_bytes": held,
        "resident_bytes_after_delete": resident() - held_before,
    }


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]))))
