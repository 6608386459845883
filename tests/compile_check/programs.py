"""What is compiled: decode steps over one abstract host cache, in every form a user writes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import directkv_jax
from compile_check import target

LAYERS, BATCH, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32, 8, 128
MAX_LENGTH = 1 << 20  # tokens of a row: a cache of 32 GiB, so that no part of it hides in a limit

# A `lax.cond` around an append copies the cache twice, host to host, up to this release of XLA.
COND_COPIES = target.plugin_version() <= (0, 11, 0)


@dataclasses.dataclass(frozen=True)
class Program:
    """One thing to compile.

    Attributes:
      name: of the program.
      lower: () -> (`jax.stages.Lowered`, the abstract cache it takes, updates and returns).
      copies: a negative control. It copies the cache, and the check must say so.
      shards: GPUs that share the cache.
    """

    name: str
    lower: Callable[[], tuple[jax.stages.Lowered, directkv_jax.KVCache]]
    copies: bool = False
    shards: int = 1


def core_programs() -> list[Program]:
    """Programs over the public functions alone."""
    return [
        Program("decode_attention, layers unrolled", _lower(_unrolled)),
        Program("decode_attention, T = 5 ragged, window, soft cap", _ragged),
        Program("decode_attention, scan over layers", _lower(_scan)),
        Program("qkv_attention, layers unrolled", _qkv),
        Program("qkv_attention, T = 64: not fused", functools.partial(_qkv, count=64)),
        Program(
            "qkv_attention, scan, bias and norms, KV heads over 4 GPUs",
            functools.partial(_qkv_scan, shards=4),
            shards=4,
        ),
        Program("decode_attention, while_loop over steps", _lower(_while)),
        Program("attend under vmap, then append", _lower(_vmap)),
        Program("decode_attention, cond around the step", _lower(_cond), copies=COND_COPIES),
        Program("fork", _fork),
        Program("shard_map, KV heads over 4 GPUs", _sharded, shards=4),
        Program("control: cache not donated", _lower(_unrolled, donate=()), copies=True),
        Program("control: attends to a slice", _lower(_slice), copies=True),
        Program("control: scan with the cache as xs", _lower(_scan_xs), copies=True),
    ]


def cache(devices, **options) -> directkv_jax.KVCache:
    """The abstract cache of the core programs."""
    options = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **options}
    return target.empty_cache(devices, BATCH, MAX_LENGTH, **options)


def tokens(mesh, count=1, dtype=jnp.bfloat16):
    """Abstract query, key and value of `count` new tokens."""
    return [
        target.array(mesh, (BATCH, count, heads, HEAD_DIM), dtype)
        for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    ]


def _lower(step, donate=0):
    def lower():
        mesh = target.h200()
        held = cache(mesh)
        with target.tracing_for_cuda():
            return jax.jit(step, donate_argnums=donate).lower(held, *tokens(mesh)), held

    return lower


def _unrolled(cache, q, k, v):
    for layer in range(LAYERS):
        out, cache = directkv_jax.decode_attention(q, k, v, cache, layer=layer)
        q = q + out  # each layer depends on the one before, as in a model
    return cache.advance(1), q


def _scan(cache, q, k, v):
    def body(carry, layer):
        cache, q = carry
        out, cache = directkv_jax.decode_attention(q, k, v, cache, layer=layer)
        return (cache, q + out), None

    (cache, q), _ = jax.lax.scan(body, (cache, q), jnp.arange(LAYERS))
    return cache.advance(1), q


def _while(cache, q, k, v):
    def body(carry):
        cache, q, step = carry
        cache, q = _unrolled(cache, q, k, v)
        return cache, q, step + 1

    return jax.lax.while_loop(lambda carry: carry[2] < 64, body, (cache, q, jnp.int32(0)))[:2]


def _cond(cache, q, k, v):
    going = ~cache.overflowed.all()
    return jax.lax.cond(going, _unrolled, lambda cache, q, k, v: (cache, q), cache, q, k, v)


def _vmap(cache, q, k, v):
    queries = jnp.stack([q, -q, 2 * q])
    out = jax.vmap(lambda q: directkv_jax.attend(q, cache, k, v, layer=1))(queries)
    return directkv_jax.append(cache, k, v, layer=1, after=out).advance(1), out


def _slice(cache, q, k, v):
    part = cache.replace(pages=cache.pages[1:2], tracked=False)
    out = directkv_jax.attend(q, part)
    return directkv_jax.append(cache, k, v, layer=1, after=out).advance(1), out


def _scan_xs(cache, q, k, v):
    def body(q, pages):
        one = cache.replace(pages=pages[None])
        out, one = directkv_jax.decode_attention(q, k, v, one)
        return q + out, one.pages[0]

    q, pages = jax.lax.scan(body, q, cache.pages)
    return cache.replace(pages=pages).advance(1), q


def _weights(mesh, width):
    group = QUERY_HEADS // KV_HEADS
    return (
        target.array(mesh, (width, KV_HEADS, group + 2, HEAD_DIM), jnp.bfloat16),
        target.array(mesh, (QUERY_HEADS * HEAD_DIM, width), jnp.bfloat16),
    )


def _qkv(count=1):
    mesh, width = target.h200(), 1024
    held = cache(mesh)
    x = target.array(mesh, (BATCH, count, width), jnp.bfloat16)
    rope = directkv_jax.RoPE.create(HEAD_DIM)

    def step(cache, x, kernel, back):
        projection = directkv_jax.QKVProjection(kernel)
        for layer in range(LAYERS):
            out, cache = directkv_jax.qkv_attention(x, projection, cache, layer=layer, rope=rope)
            x = x + out.reshape(BATCH, count, -1) @ back
        return cache.advance(count), x

    with target.tracing_for_cuda():
        return jax.jit(step, donate_argnums=0).lower(held, x, *_weights(mesh, width)), held


def _qkv_scan(shards):
    mesh, width = target.h200((shards,), ("heads",)), 1024
    held = cache(mesh, mesh=mesh, kv_head_axis="heads")
    x = target.array(mesh, (BATCH, 2, width), jnp.bfloat16)
    kernel, back = _weights(mesh, width)
    bias = target.array(mesh, kernel.shape[1:], jnp.bfloat16)
    norm = target.array(mesh, (HEAD_DIM,), jnp.bfloat16)

    def step(cache, x, kernel, back, bias, norm):
        projection = directkv_jax.QKVProjection(kernel, bias, norm, norm)

        def body(carry, layer):
            cache, x = carry
            out, cache = directkv_jax.qkv_attention(x, projection, cache, layer=layer)
            return (cache, x + out.reshape(BATCH, 2, -1) @ back), None

        (cache, x), _ = jax.lax.scan(body, (cache, x), jnp.arange(LAYERS))
        return cache.advance(2), x

    with target.tracing_for_cuda():
        lowered = jax.jit(step, donate_argnums=0).lower(held, x, kernel, back, bias, norm)
        return lowered, held


def _ragged():
    mesh = target.h200()
    held = cache(mesh)
    valid = target.array(mesh, (BATCH,), jnp.int32)

    def step(cache, valid, q, k, v):
        options = {"query_seq_lengths": valid, "return_residual": True}
        for layer in range(LAYERS):
            (out, lse), cache = directkv_jax.decode_attention(
                q, k, v, cache, layer=layer, local_window_size=(4095, 0), logits_soft_cap=30.0,
                **options,
            )  # fmt: skip
            q = q + out
        return cache.advance(valid), q, lse

    with target.tracing_for_cuda():
        return jax.jit(step, donate_argnums=0).lower(held, valid, *tokens(mesh, 5)), held


def _fork():
    mesh = target.h200()
    held = cache(mesh)
    rows = target.array(mesh, (BATCH,), jnp.int32)
    with target.tracing_for_cuda():
        fork = jax.jit(lambda cache, rows: cache.fork(rows), donate_argnums=0)
        return fork.lower(held, rows), held


def _sharded():
    mesh = target.h200((4,), ("heads",))
    held = cache(mesh, mesh=mesh, kv_head_axis="heads")
    with target.tracing_for_cuda():
        return jax.jit(_unrolled, donate_argnums=0).lower(held, *tokens(mesh)), held
