"""What directkv_jax is compared with: each a function of (query, lengths, *layers).

`query` is `[B, T, N, H]`, `lengths` int32 `[B]` or None (all rows are full; not for `naive`), a
layer a pair of keys and values `[B, S, K, H]`. The result of one layer is the query of the next;
all of them read cached tokens only, none of them new ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax import _native
from directkv_jax.bench import timing
from directkv_jax.bench.attention_cases import ONLY_IN, Case

# Blocks that make the naive kernel fast on any of our GPUs: a few waves on 132 SMs.
_NAIVE_BLOCKS, _NAIVE_MIN_TOKENS = 1024, 256


def heads_first(case: Case) -> bool:
    """Whether the baseline is given `[B, K, S, H]`: Pallas' kernel reads that, and would copy."""
    return case.implementation == "pallas"


def variants(case: Case) -> tuple[str, ...]:
    """Ways to run the baseline, the preferred one first; the next is for when that one fails."""
    return ("cudnn", "xla") if case.implementation == "staged" else ("",)


def make(case: Case, variant: str) -> Callable[..., Any]:
    """The baseline of `case`.

    Raises:
      NotImplementedError: it does not exist for this case, or on this machine.
    """
    name = case.implementation
    if case.appends:
        raise NotImplementedError(f"`{name}` only attends: it has no paged cache to append to.")
    if ONLY_IN.get(name, case.placement) != case.placement:
        raise NotImplementedError(f"`{name}` is for keys and values in {ONLY_IN[name]} memory.")
    if name in ("naive", "cudnn", "pallas") and not timing.on_cuda():
        raise NotImplementedError(f"`{name}` needs a CUDA GPU.")
    kernels: dict[str, Callable[..., Any]] = {
        "naive": functools.partial(_naive, host=case.placement == "host"),
        "staged": functools.partial(_staged, implementation=variant),
        "cudnn": functools.partial(_jax_attention, implementation="cudnn"),
        "jax-xla": functools.partial(_jax_attention, implementation="xla"),
        "pallas": _pallas,
    }
    one = kernels[name]
    _check(case)

    def run(query, lengths, *layers):
        if name == "staged":
            # Its copies wait for the query like everything else, and for nothing but the query:
            # XLA may start all of them at once.
            query, layers = timing.after(query, layers)
        for layer in layers:
            if name != "staged":
                query, layer = timing.after(query, layer)
            query = one(query, lengths, *layer)
        return query

    return run


def _check(case: Case) -> None:
    name = case.implementation
    if name in ("naive", "pallas") and case.query_tokens != 1:
        raise NotImplementedError(f"`{name}` takes one new token, not {case.query_tokens}.")
    if name == "naive" and (case.dtype == "float32" or case.head_dim % 8 or case.head_dim > 256):
        raise NotImplementedError("`naive` takes bfloat16 or float16 and head dims of 8 to 256.")


def _naive(query, lengths, keys, values, *, host: bool):
    """The usual zero-copy way: every query head reads the cache of its KV head for itself."""
    timing.native()
    batch, _, heads, dim = query.shape
    slots = keys.shape[1]
    splits = min(-(-_NAIVE_BLOCKS // (batch * heads)), max(1, slots // _NAIVE_MIN_TOKENS))
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((batch, heads, splits, dim + 2), jnp.float32),
    )
    out, _ = jax.ffi.ffi_call(_native.NAIVE_ATTEND, results)(
        query, keys, values, lengths, host=np.int32(host), scale=np.float32(1 / math.sqrt(dim))
    )
    return out


def _staged(query, lengths, keys, values, *, implementation):
    """Copied to the device in jit, then attended to there: what plain JAX offers today."""
    keys, values = jax.device_put((keys, values), jax.memory.Space.Device)
    return _jax_attention(query, lengths, keys, values, implementation=implementation)


def _jax_attention(query, lengths, keys, values, *, implementation):
    return jax.nn.dot_product_attention(
        query, keys, values, key_value_seq_lengths=lengths, implementation=implementation
    )


def _pallas(query, lengths, keys, values):
    """JAX's decode kernel, with as many splits of the cache as fill the GPU."""
    from jax.experimental.pallas.ops.gpu import decode_attention

    batch, kv_heads, slots, _ = keys.shape
    wanted = max(16, -(-4 * 132 // (batch * kv_heads)))
    # gqa asks for slots % (splits * block_k) == 0.
    splits = [n for n in (16, 32, 64, 128, 256) if slots % (128 * n) == 0] or [1]
    chosen = next((n for n in splits if n >= wanted), splits[-1])
    # It swaps the axes itself; XLA drops the two swaps against each other.
    keys, values = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
    out = decode_attention.gqa(
        query[:, 0], keys, values, kv_seq_len=lengths, k_splits=chosen, block_k=128
    )
    return out[:, None].astype(query.dtype)
