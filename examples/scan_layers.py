"""A stack of layers under `nnx.scan` and `nn.scan`, all in one host cache.

The cache is the carry of the scan and the layer index its xs: a host cache that were itself scanned
would be sliced, and a slice is a copy. Run: python examples/scan_layers.py
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import directkv_jax
import directkv_jax.linen
import directkv_jax.nnx

LAYERS, BATCH, STEPS, MAX_LENGTH, FEATURES, HEADS, KV_HEADS = 6, 2, 16, 1024, 256, 4, 2


class NnxBlock(nnx.Module):
    """Pre-norm attention around a cache that is handed in and out."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = directkv_jax.nnx.MultiHeadAttention(
            HEADS, FEATURES, num_kv_heads=KV_HEADS, decode=False, rngs=rngs
        )

    def __call__(self, x, cache, layer):
        """The layer does not know its index, so that one compiled body serves all."""
        y, cache = self.attention(self.norm(x), cache=cache, layer=layer)
        return x + y, cache


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap
def nnx_blocks(rngs: nnx.Rngs) -> NnxBlock:
    return NnxBlock(rngs)


@nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
def nnx_layers(carry, block, layer):
    return block(*carry, layer)


class LinenBlock(nn.Module):
    """The same in Linen, with the carry and the xs of `nn.scan`."""

    @nn.compact
    def __call__(self, carry, layer):
        """Returns the carry, and no ys."""
        x, cache = carry
        attention = directkv_jax.linen.MultiHeadDotProductAttention(
            num_heads=HEADS, num_kv_heads=KV_HEADS
        )
        y, cache = attention(nn.LayerNorm()(x), cache=cache, layer=layer)
        return (x + y, cache), None


class LinenLayers(nn.Module):
    """All layers in one scan."""

    @nn.compact
    def __call__(self, x, cache):
        """Lengths are the caller's to advance."""
        layers = nn.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            check_constancy_invariants=False,  # Flax's check forgets that the cache is on the host
        )
        (x, cache), _ = layers()((x, cache), jnp.arange(LAYERS))
        return x, cache


def create_cache(max_length: int) -> directkv_jax.KVCache:
    return directkv_jax.KVCache.create(
        BATCH, max_length, num_layers=LAYERS, num_kv_heads=KV_HEADS,
        head_dim=FEATURES // HEADS, dtype=jnp.float32,
    )  # fmt: skip


def decode(name: str, layers, params) -> None:
    """Steps through `layers(params, x, cache)`, jitted with the cache alone donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, params, x):
        x, cache = layers(params, x, cache)
        return x, cache.advance(x.shape[1])  # once per step, after all layers

    cache = create_cache(MAX_LENGTH)
    address = cache.pages.unsafe_buffer_pointer()
    x = jax.random.normal(jax.random.key(0), (BATCH, 1, FEATURES))
    for _ in range(STEPS):
        x, cache = step(cache, params, x)
    print(f"{name}: {cache}")
    print(f"  |x| after {STEPS} steps: {jnp.linalg.norm(x):.3f}")
    print(f"  the cache stayed in place: {cache.pages.unsafe_buffer_pointer() == address}")


def main() -> None:
    graphdef, params = nnx.split(nnx_blocks(nnx.Rngs(0)))

    def scanned(params, x, cache):
        return nnx_layers((x, cache), nnx.merge(graphdef, params), jnp.arange(LAYERS))

    decode("nnx.scan", scanned, params)

    model = LinenLayers()
    small = create_cache(1)  # init copies the cache it is given
    params = model.init(jax.random.key(0), jnp.zeros((BATCH, 1, FEATURES)), small)
    decode("nn.scan", model.apply, params)


if __name__ == "__main__":
    main()
