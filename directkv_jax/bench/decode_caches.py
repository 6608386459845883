"""The caches of `directkv bench decode`, each filled with random tokens on the device.

`filled_pages` fills a `KVCache`. The other two are how one decodes in plain JAX: `HbmCache` keeps
contiguous keys and values in device memory, `StagedCache` keeps them in host memory and copies one
layer ahead. Both take rows of equal length, so that a new token is one `dynamic_update_slice`.

All three repeat one random chunk of tokens: what is measured does not depend on the values, only on
their being written and not all alike (zeros compress in some memories, and pages that were never
written are one page).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import directkv_jax
from directkv_jax import memory

CHUNK = 1024  # tokens written at once; 4 MiB of keys and values for 8 heads of 128


def filled_pages(cache: directkv_jax.KVCache, length: int) -> directkv_jax.KVCache:
    """Appends random tokens to every layer, in place, until rows hold `length`. Consumes `cache`.

    Device memory holds one chunk, whatever the placement.
    """
    key, value = _random_chunk(cache.batch, length, cache.num_kv_heads, cache.head_dim, cache.dtype)
    return _append_all(cache, key, value, jnp.int32(length))


@functools.partial(jax.jit, donate_argnums=0)
def _append_all(cache, key, value, length):
    layers, chunk = cache.num_layers, key.shape[1]

    def body(index, cache):
        count = jnp.minimum(length - cache.lengths, chunk)
        cache = directkv_jax.append(
            cache, key, value, layer=index % layers, query_seq_lengths=count
        )
        return cache.advance(jnp.where(index % layers == layers - 1, count, 0))

    return jax.lax.fori_loop(0, layers * -(-length // chunk), body, cache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HbmCache:
    """Contiguous keys and values in device memory: the usual way.

    Attributes:
      keys: L arrays `[B, S, K, H]`, after RoPE.
      values: L arrays `[B, S, K, H]`.
      lengths: int32 `[B]`, all equal.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array

    @classmethod
    def filled(cls, layers: int, batch: int, length: int, capacity: int, heads: int, dim: int):
        """A cache with room for `capacity` tokens a row, `length` of them used."""
        return cls(*_filled_layers("device", layers, batch, length, capacity, heads, dim))

    def decode(self, model, tokens, attention: str):
        """One step: int32 `[B, 1]` -> (float32 logits `[B, 1, vocabulary]`, the cache)."""
        keys, values = list(self.keys), list(self.values)

        def attend(x, projection, cache, *, layer, rope, **options):
            del options  # those of a model without windows or soft caps
            query, key, value = _projected(x, projection, self.lengths, rope)
            keys[layer] = _write(keys[layer], key, self.lengths)
            values[layer] = _write(values[layer], value, self.lengths)
            return _attention(query, keys[layer], values[layer], self.lengths, attention), cache

        capacity = self.keys[0].shape[1]
        x, _ = model.hidden(tokens, None, self.lengths, capacity, attend)
        return model.logits(x), HbmCache(tuple(keys), tuple(values), self.lengths + 1)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of keys and values in (host, device) memory."""
        return 0, _nbytes(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StagedCache:
    """Keys and values in host memory, copied to the device one layer ahead of their use.

    While layer i attends, the copy engine brings keys and values of layer i + 1. The copies are
    `jax.device_put` inside one jit. An `optimization_barrier` ties each to the query of the layer
    before: without it XLA starts all copies first and holds the whole cache in device memory; with
    it two layers are there at a time. XLA overlaps copies with compute only under its latency
    hiding scheduler, which the caller has to turn on (`OVERLAP`).

    New tokens are written into the host arrays in place, after the last layer: a
    `dynamic_update_slice` of a donated `<host>` array does not copy it.

    Attributes:
      keys: L arrays `<host>[B, S, K, H]`, after RoPE.
      values: L arrays `<host>[B, S, K, H]`.
      lengths: int32 `[B]`, all equal; in device memory.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array

    @classmethod
    def filled(cls, layers: int, batch: int, length: int, capacity: int, heads: int, dim: int):
        """As `HbmCache.filled`; device memory holds one array at a time."""
        return cls(*_filled_layers("host", layers, batch, length, capacity, heads, dim))

    def decode(self, model, tokens, attention: str):
        """One step: int32 `[B, 1]` -> (float32 logits `[B, 1, vocabulary]`, the cache)."""
        layers = len(self.keys)
        host = list(zip(self.keys, self.values, strict=True))
        staged = {0: _to_device(host[0])}
        fresh = []

        def attend(x, projection, cache, *, layer, rope, **options):
            del options  # those of a model without windows or soft caps
            query, key, value = _projected(x, projection, self.lengths, rope)
            if layer + 1 < layers:
                ahead, query = jax.lax.optimization_barrier((host[layer + 1], query))
                staged[layer + 1] = _to_device(ahead)
            fresh.append((key, value))
            keys, values = (
                _write(old, new, self.lengths)
                for old, new in zip(staged.pop(layer), (key, value), strict=True)
            )
            return _attention(query, keys, values, self.lengths, attention), cache

        capacity = self.keys[0].shape[1]
        x, _ = model.hidden(tokens, None, self.lengths, capacity, attend)
        # Writes come after every copy out of the host arrays, or they would need copies of them.
        host, fresh, x = jax.lax.optimization_barrier((host, fresh, x))
        new = jax.device_put(fresh, jax.memory.Space.Host)
        keys, values = zip(
            *(
                [_write(array, tokens, self.lengths) for array, tokens in zip(*pair, strict=True)]
                for pair in zip(host, new, strict=True)
            ),
            strict=True,
        )
        return model.logits(x), StagedCache(keys, values, self.lengths + 1)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of keys and values in (host, device) memory, between steps."""
        return _nbytes(self), 0


# Compiler options of a step over a `StagedCache` on a GPU; XLA's default is off.
OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}


def one_device(placement: str) -> NamedSharding:
    """The memory of the first device, or the host memory beside it."""
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory.memory_kind(placement))


def _filled_layers(
    placement: str, layers: int, batch: int, length: int, capacity: int, heads: int, dim: int
):
    key, value = _random_chunk(batch, length, heads, dim, jnp.bfloat16)
    where = one_device(placement)

    @functools.partial(jax.jit, out_shardings=where)
    def tiled(chunk):
        copies = -(-capacity // chunk.shape[1])
        return jax.device_put(jnp.tile(chunk, (1, copies, 1, 1))[:, :capacity], where)

    # One after the other: where memory runs out, the first array that has no room ends it. Each one
    # in the queue behind it would make the allocator wait.
    keys, values = (
        tuple(jax.block_until_ready(tiled(chunk)) for _ in range(layers)) for chunk in (key, value)
    )
    lengths = jnp.full((batch,), length, jnp.int32)
    return keys, values, jax.device_put(lengths, one_device("device"))


def _random_chunk(batch: int, length: int, heads: int, dim: int, dtype) -> list[jax.Array]:
    shape = (batch, min(length, CHUNK), heads, dim)
    return [jax.random.normal(jax.random.key(seed), shape, dtype) for seed in (1, 2)]


def _to_device(arrays) -> Any:
    return jax.device_put(arrays, jax.memory.Space.Device)


def _projected(x, projection, lengths, rope):
    """Query, key and value of one new token in each row, as `qkv_attention` computes them."""
    return [part.astype(x.dtype) for part in projection(x, lengths[:, None], rope)]


def _write(cached, new, lengths):
    return jax.lax.dynamic_update_slice_in_dim(cached, new, lengths[0], axis=1)


def _attention(query, keys, values, lengths, implementation: Any):
    """Attends to the tokens of the row, the one just written included."""
    return jax.nn.dot_product_attention(
        query, keys, values, key_value_seq_lengths=lengths + 1, implementation=implementation
    )


def _nbytes(cache) -> int:
    return sum(array.nbytes for array in (*cache.keys, *cache.values))
