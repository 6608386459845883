"""Decodes a few steps over a context of the given length; prints the peak of device memory.

python measure_hbm_peak.py TOKENS
"""

from __future__ import annotations

import functools
import json
import sys

import jax
import jax.numpy as jnp

import directkv_jax


def main(tokens: int) -> dict:
    cache = directkv_jax.KVCache.create(1, tokens + 64, num_kv_heads=8, head_dim=128, num_layers=2)
    new = [jnp.ones((1, 1, heads, 128), jnp.bfloat16) for heads in (32, 8, 8)]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, q, k, v):
        for layer in range(cache.num_layers):
            q, cache = directkv_jax.decode_attention(q, k, v, cache, layer=layer)
        return cache.advance(1), q

    # What the slots hold does not matter here, only how many of them are read.
    cache = cache.replace(lengths=jnp.full((1,), tokens, jnp.int32))
    for _ in range(8):
        cache, out = step(cache, *new)
    jax.block_until_ready(out)
    stats = jax.local_devices()[0].memory_stats()
    result = {
        "tokens": tokens,
        "cache_bytes": cache.nbytes,
        "peak_bytes": stats["peak_bytes_in_use"],
    }
    cache.delete()
    return result


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
