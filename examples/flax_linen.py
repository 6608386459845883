"""A Flax Linen attention layer decodes with its keys and values in host memory.

The layer takes Flax's parameters and is compared with Flax's own, step by step. Run:
python examples/flax_linen.py
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

import directkv_jax.linen

BATCH, PROMPT, STEPS, MAX_LENGTH, FEATURES = 2, 8, 24, 1024, 256


def main() -> None:
    theirs = nn.MultiHeadDotProductAttention(num_heads=4, decode=True)
    ours = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, decode=True)

    dummy = jnp.zeros((BATCH, MAX_LENGTH, FEATURES))  # its length is the capacity, as in Flax
    variables = jax.jit(theirs.init)(jax.random.key(0), dummy)
    params, flax_cache = variables["params"], variables["cache"]
    cache = directkv_jax.linen.init_cache(ours, dummy)

    # The cache is donated, and only the cache: what is not donated XLA would copy.
    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, params, x):
        y, state = ours.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return state["cache"], y

    @functools.partial(jax.jit, donate_argnums=0)
    def flax_step(cache, params, x):
        y, state = theirs.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return state["cache"], y

    x = jax.random.normal(jax.random.key(2), (BATCH, PROMPT + STEPS, FEATURES))
    address = cache["kv_cache"].pages.unsafe_buffer_pointer()

    for t in range(PROMPT):  # Flax takes one token at a time,
        flax_cache, expected = flax_step(flax_cache, params, x[:, t : t + 1])
    cache, y = step(cache, params, x[:, :PROMPT])  # ours takes any number
    error = jnp.abs(y[:, -1:] - expected).max()
    for t in range(PROMPT, PROMPT + STEPS):
        flax_cache, expected = flax_step(flax_cache, params, x[:, t : t + 1])
        cache, y = step(cache, params, x[:, t : t + 1])
        error = jnp.maximum(error, jnp.abs(y - expected).max())

    held = cache["kv_cache"]
    print(held)
    print(f"{PROMPT} tokens at once, then {STEPS} steps; largest difference from Flax {error:.1e}")
    print(f"keys and values: {held.host_bytes} bytes on the host, {held.device_bytes} elsewhere")
    print(f"the cache stayed in place: {held.pages.unsafe_buffer_pointer() == address}")


if __name__ == "__main__":
    main()
