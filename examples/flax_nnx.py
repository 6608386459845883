"""A Flax NNX attention layer decodes with its keys and values in host memory.

The layer takes Flax's parameters and is compared with Flax's own, step by step. Run:
python examples/flax_nnx.py
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

import directkv_jax.nnx

BATCH, PROMPT, STEPS, MAX_LENGTH, FEATURES = 2, 8, 24, 1024, 256


def main() -> None:
    theirs = nnx.MultiHeadAttention(4, FEATURES, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
    ours = directkv_jax.nnx.MultiHeadAttention(4, FEATURES, num_kv_heads=2, rngs=nnx.Rngs(1))
    nnx.update(ours, nnx.state(theirs, nnx.Param))  # the other direction works too

    theirs.init_cache((BATCH, MAX_LENGTH, FEATURES))
    ours = nnx.view(ours, decode=True, batch_size=BATCH, max_length=MAX_LENGTH)

    # The cache is split off and donated, and only the cache: what is not donated XLA would copy.
    graphdef, cache, rest = nnx.split(ours, nnx.Cache, ...)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, rest, x):
        model = nnx.merge(graphdef, cache, rest)
        y = model(x)
        return nnx.state(model, nnx.Cache), y

    flax_step = nnx.jit(lambda model, x: model(x))
    x = jax.random.normal(jax.random.key(2), (BATCH, PROMPT + STEPS, FEATURES))
    address = cache["kv_cache"].get_value().pages.unsafe_buffer_pointer()

    for t in range(PROMPT):  # Flax takes one token at a time,
        expected = flax_step(theirs, x[:, t : t + 1])
    cache, y = step(cache, rest, x[:, :PROMPT])  # ours takes any number
    error = jnp.abs(y[:, -1:] - expected).max()
    for t in range(PROMPT, PROMPT + STEPS):
        cache, y = step(cache, rest, x[:, t : t + 1])
        error = jnp.maximum(error, jnp.abs(y - flax_step(theirs, x[:, t : t + 1])).max())

    held = cache["kv_cache"].get_value()
    print(held)
    print(f"{PROMPT} tokens at once, then {STEPS} steps; largest difference from Flax {error:.1e}")
    print(f"keys and values: {held.host_bytes} bytes on the host, {held.device_bytes} elsewhere")
    print(f"the cache stayed in place: {held.pages.unsafe_buffer_pointer() == address}")


if __name__ == "__main__":
    main()
