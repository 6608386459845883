"""The keys and values that `directkv bench attention` reads: a paged pool, and dense arrays.

Both hold one block of random tokens again and again, so that tens of GiB are filled in seconds and
without a copy of them in device memory. The exact result is still cheap: a softmax over n copies of
a block is one over the block, each token weighted by n. So every row and head can be checked.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import directkv_jax
from directkv_jax import memory
from directkv_jax.bench.attention_cases import PAGE_SIZE, Case

BLOCK_TOKENS = 4096  # distinct tokens, whole pages of them


def random_block(case: Case, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[tokens, K, H]`, standard normal, the same for equal arguments."""
    shape = (2, tokens, case.kv_heads, case.head_dim)
    block = jax.random.normal(jax.random.key(7), shape, jnp.dtype(case.dtype))
    return block[0], block[1]


class PagedPool:
    """One filled pool, large enough for several cases, each with page tables of its own.

    Page p of every layer holds page `p % (block / page size)` of the block.
    """

    def __init__(self, cases: list[Case]):
        first = cases[0]
        self.key = self.key_of(first)
        pages = max(case.pages for case in cases)
        self.block = min(BLOCK_TOKENS, pages * PAGE_SIZE)
        tokens = math.ceil(pages * PAGE_SIZE / self.block) * self.block
        self.keys, self.values = random_block(first, self.block)
        cache = directkv_jax.KVCache.create(
            1, tokens, num_kv_heads=first.kv_heads, head_dim=first.head_dim,
            num_layers=first.layers, dtype=jnp.dtype(first.dtype), page_size=PAGE_SIZE,
            placement=first.placement,
        )  # fmt: skip
        for _ in range(tokens // self.block):
            cache = _append_block(cache, self.keys[None], self.values[None])
        self.cache = jax.block_until_ready(cache)

    @staticmethod
    def key_of(case: Case) -> tuple:
        """Cases with equal keys can share a pool."""
        return case.placement, case.layers, case.kv_heads, case.head_dim, case.dtype

    def view(self, case: Case) -> directkv_jax.KVCache:
        """The rows of `case` in this pool; shares its pages."""
        order = np.arange(self.cache.num_pages, dtype=np.int32)
        if case.shuffled:
            np.random.default_rng(0).shuffle(order)
        table = np.zeros((case.batch, case.row_pages), np.int32)
        begin = 0
        for row, length in enumerate(case.lengths):
            count = math.ceil((length + case.query_tokens) / PAGE_SIZE)
            table[row, :count] = order[begin : begin + count]
            begin += count
        put = functools.partial(jax.device_put, device=memory.beside(self.cache.pages))
        return self.cache.replace(
            page_table=put(table),
            lengths=put(np.array(case.lengths, np.int32)),
            overflowed=put(np.zeros((case.batch,), bool)),
        )

    def adopt(self, cache: directkv_jax.KVCache) -> None:
        """Takes the pages back after a program that the pool was donated to."""
        self.cache = self.cache.replace(pages=cache.pages)

    def counts(self, case: Case) -> np.ndarray:
        """float32 `[B, block]`: how often each row sees each token of the block."""
        kinds = self.block // PAGE_SIZE
        table = np.asarray(self.view(case).page_table) % kinds
        counts = np.zeros((case.batch, kinds, PAGE_SIZE), np.float32)
        for row, length in enumerate(case.lengths):
            full, rest = divmod(length, PAGE_SIZE)
            np.add.at(counts[row], table[row, :full], 1)
            if rest:
                counts[row, table[row, full], :rest] += 1
        return counts.reshape(case.batch, self.block)

    def delete(self) -> None:
        """Frees the pages."""
        self.cache.delete()


@functools.partial(jax.jit, donate_argnums=0)
def _append_block(cache, key, value):
    for layer in range(cache.num_layers):
        cache = directkv_jax.append(cache, key, value, layer=layer)
    return cache.advance(key.shape[1])


class DenseArrays:
    """Keys and values `[B, S, K, H]` of every layer, as JAX users keep them; S the longest row.

    Slot s of every row holds token `s % block`. With `heads_first` the arrays are `[B, K, S, H]`.
    """

    def __init__(self, case: Case, heads_first: bool = False):
        self.key = self.key_of(case, heads_first)
        self.block = min(BLOCK_TOKENS, case.max_length)
        self.keys, self.values = random_block(case, self.block)
        blocks = [self.keys, self.values]
        if heads_first:
            blocks = [jnp.swapaxes(block, 0, 1) for block in blocks]
        make = _dense_in_host_memory if case.placement == "host" else _dense_on_device
        shape = (case.batch, case.max_length, case.kv_heads, case.head_dim)
        self.layers = [
            tuple(make(block, shape, heads_first) for block in blocks) for _ in range(case.layers)
        ]
        self.lengths = jnp.asarray(case.lengths, jnp.int32)
        jax.block_until_ready(self.layers)

    @staticmethod
    def key_of(case: Case, heads_first: bool) -> tuple:
        """Cases with equal keys read equal arrays."""
        shape = (case.lengths, case.kv_heads, case.head_dim, case.dtype)
        return (case.placement, case.layers, heads_first, *shape)

    def counts(self, case: Case) -> np.ndarray:
        """As `PagedPool.counts`."""
        slot = np.arange(self.block)
        lengths = np.array(case.lengths)[:, None]
        return (lengths // self.block + (slot < lengths % self.block)).astype(np.float32)

    def delete(self) -> None:
        """Frees the arrays."""
        for array in jax.tree.leaves(self.layers):
            array.delete()


def _dense_on_device(block, shape, heads_first: bool):
    @jax.jit
    def make(block):
        axis = 1 if heads_first else 0
        row = jnp.take(block, jnp.arange(shape[1]) % block.shape[axis], axis=axis)
        return jnp.broadcast_to(row, (shape[0], *row.shape))

    return make(block)


def _dense_in_host_memory(block, shape, heads_first: bool):
    assert not heads_first, "only a baseline in device memory asks for it"
    # As plain JAX allocates it: what the baseline copies must not depend on our pools.
    host = jax.memory.Space.Host
    array = jax.jit(lambda: jax.device_put(jax.lax.empty(shape, block.dtype), host))()
    ((address, nbytes),) = memory.base_pointers(jax.block_until_ready(array))
    # Written by the CPU through the address: nobody else holds the array yet, and a jitted program
    # would stage it.
    view = np.ctypeslib.as_array(_bytes_at(address, nbytes)).reshape(shape[0], shape[1], -1)
    source = np.asarray(block).view(np.uint8).reshape(block.shape[0], -1)

    def write(place: tuple[int, int]) -> None:
        row, begin = place
        part = view[row, begin : begin + len(source)]
        part[:] = source[: len(part)]

    places = [(row, begin) for row in range(shape[0]) for begin in range(0, shape[1], len(source))]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(write, places))
    return array


def _bytes_at(address: int, nbytes: int):
    import ctypes

    return (ctypes.c_uint8 * nbytes).from_address(address)
