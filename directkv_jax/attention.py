"""Exact attention over a paged cache that may lie in host memory: the public functions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax import _checks, _rows
from directkv_jax._layout import PageLayout
from directkv_jax._platform import any_tracer, platform_of
from directkv_jax._sharding import CacheSpecs, over_mesh
from directkv_jax.cache import KVCache
from directkv_jax.implementations import choose, get
from directkv_jax.implementations._base import Options, Request, Rows
from directkv_jax.memory import space_of


def decode_attention(
    query, key, value, cache: KVCache, *, layer=0, query_seq_lengths=None, scale=None,
    logits_soft_cap=None, local_window_size=None, sinks=None, return_residual=False,
    implementation=None, num_ctas=None,
):  # fmt: skip
    """Attends to the cached tokens and the new ones, then appends the new ones to the cache.

    The cache is read where it lies: with `placement="host"` the kernel reads CPU memory over the
    link and nothing that grows with the context is placed in device memory. New tokens are causal
    among themselves; query `t` of row `b` stands at position `cache.lengths[b] + t`.

    `cache.lengths` do not change: call `cache.advance(n)` once per step, after all layers. Under
    `jax.jit` donate the cache, and only the cache (`donate_argnums`), or XLA copies it at every
    step. Called eagerly, it consumes the cache it is given.

    Example::

      cache = directkv_jax.KVCache.create(1, 4096, num_kv_heads=8, head_dim=128)
      @functools.partial(jax.jit, donate_argnums=0)
      def step(cache, q, k, v):
          out, cache = directkv_jax.decode_attention(q, k, v, cache)
          return cache.advance(1), out

    Args:
      query: `[B, T, N, H]`, N a multiple of K, dtype of the cache. T is the number of new tokens.
      key: `[B, T, K, H]`, after RoPE.
      value: `[B, T, K, H]`.
      cache: the cache; every size about a request is data in it, so no step recompiles.
      layer: which layer of the cache, an int or a traced int32 scalar (in a scan over layers).
      query_seq_lengths: int32 `[B]`, how many of the T tokens are valid in each row (default: all).
        0 reads nothing, writes nothing and returns zeros.
      scale: factor on q.k; default `1 / sqrt(H)`.
      logits_soft_cap: logits become `cap * tanh(logits / cap)`.
      local_window_size: as in `jax.nn.dot_product_attention`: a query sees the `left` positions
        before its own. A Hugging Face `sliding_window=W` is `(W - 1, 0)`.
      sinks: reserved; refused.
      return_residual: also return the log-sum-exp of the logits.
      implementation: "cuda", "cpu", "xla" or "reference"; None picks the best that reads the cache
        where it lies.
      num_ctas: at most how many thread blocks (CTAs) the CUDA kernel spreads over; None chooses
        from the link: few for a host cache, which leaves the rest of the GPU free. The others
        ignore it.

    Returns:
      `(out, cache)`, or `((out, lse), cache)` with `return_residual`. out is `[B, T, N, H]`; lse is
      float32 `[B, T, N]`, -inf where a query sees nothing. A row whose new tokens do not all fit
      writes none of them and sets `cache.overflowed`; a row with lengths or page ids out of range
      gives NaN and is flagged too.

    Raises:
      ValueError, TypeError: the call is wrong; eagerly also when tokens do not fit.
      NotImplementedError: no implementation, or not the named one, can do this; and gradients.
    """
    if key is None or value is None:
        raise TypeError("`key` and `value` are required; use `attend` to read only.")
    call = prepare(
        query, key, value, cache, layer, query_seq_lengths, scale, logits_soft_cap,
        local_window_size, sinks, implementation, num_ctas,
    )  # fmt: skip
    run: Any = _traced_decode
    if not any_tracer(query, key, value, cache, call.layer, call.seq_lengths):
        _checks.check_seq_lengths(call.seq_lengths, call.tokens)
        _checks.check_values(cache, call.seq_lengths, writes=True)
        run = _eager_decode
    out, lse, cache = run(
        cache, query, key, value, call.layer, call.seq_lengths, call.options, call.name
    )
    return ((out, lse) if return_residual else out), cache


def attend(
    query, cache: KVCache, key=None, value=None, *, layer=0, query_seq_lengths=None, scale=None,
    logits_soft_cap=None, local_window_size=None, sinks=None, return_residual=False,
    implementation=None, num_ctas=None,
):  # fmt: skip
    """Attends without writing: to the cached tokens, and to fresh ones if they are given.

    With `key` and `value` this is the reading half of `decode_attention`. Without them every query
    sees all cached tokens of its row (within the window), as in cross-attention. Arguments, shapes
    and errors are those of `decode_attention`; the cache is not consumed.

    Returns:
      out `[B, T, N, H]`, or `(out, lse)` with `return_residual`.
    """
    if (key is None) != (value is None):
        raise TypeError("`key` and `value` should be given both or neither.")
    call = prepare(
        query, key, value, cache, layer, query_seq_lengths, scale, logits_soft_cap,
        local_window_size, sinks, implementation, num_ctas,
    )  # fmt: skip
    if not any_tracer(query, key, value, cache, call.layer, call.seq_lengths):
        _checks.check_seq_lengths(call.seq_lengths, call.tokens)
        _checks.check_values(cache, call.seq_lengths, writes=False)
    out, lse = _traced_attend(
        cache, query, key, value, call.layer, call.seq_lengths, call.options, call.name
    )
    return (out, lse) if return_residual else out


def append(
    cache: KVCache, key, value, *, layer=0, query_seq_lengths=None, after=None, implementation=None
) -> KVCache:
    """Writes new tokens at `cache.lengths`; the bulk write of a prefill, or half of a step.

    Rows are written whole or not at all, as in `decode_attention`. Lengths do not change.

    Args:
      cache: the cache; consumed when called eagerly, to be donated under `jax.jit`.
      key: `[B, T, K, H]`, after RoPE, dtype of the cache.
      value: `[B, T, K, H]`.
      layer: which layer of the cache.
      query_seq_lengths: int32 `[B]`, how many of the T tokens are valid.
      after: an array; the write is ordered after it. Pass the output of an `attend` to the same
        layer, or XLA may copy the whole cache to keep the order.
      implementation: see `decode_attention`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `decode_attention`.
    """
    _checks.check_cache(cache)
    tokens = key.shape[1] if getattr(key, "ndim", 0) == 4 else 1
    _check_new_tokens(key, value, cache, tokens)
    layer = _checks.check_layer(layer, cache.num_layers)
    seq_lengths = _seq_lengths(query_seq_lengths, cache, tokens)
    name = choose(implementation, _request(cache, cache.num_kv_heads)).name
    run: Any = _traced_append
    if not any_tracer(key, value, cache, layer, seq_lengths, after):
        _checks.check_seq_lengths(seq_lengths, tokens)
        _checks.check_values(cache, seq_lengths, writes=True)
        run = _eager_append
    return run(cache, key, value, layer, seq_lengths, after, name)


def unsupported_reason(
    implementation: str | None = None, *, dtype=jnp.bfloat16, head_dim: int = 128,
    num_query_heads: int | None = None, num_kv_heads: int = 1, placement: str = "host",
) -> str | None:  # fmt: skip
    """Why `implementation` (None: the default) cannot serve such a cache here; None if it can.

    Without `num_query_heads` there is one for each KV head.
    """
    num_query_heads = num_kv_heads if num_query_heads is None else num_query_heads
    try:
        layout = PageLayout(16, num_kv_heads, head_dim, dtype)
        space_of(placement)
    except (TypeError, ValueError) as error:
        return str(error)
    if num_query_heads < 1 or num_query_heads % num_kv_heads:
        return (
            f"`num_query_heads` should be a multiple of K={num_kv_heads}, but got "
            f"{num_query_heads}."
        )
    request = Request(
        platform_of(), placement, layout.dtype, head_dim, num_query_heads, num_kv_heads
    )
    if implementation is not None:
        return get(implementation).unsupported_reason(request)
    try:
        choose(None, request)
    except NotImplementedError as error:
        return str(error)
    return None


def is_supported(implementation: str | None = None, **shape) -> bool:
    """Whether `unsupported_reason` of the same arguments is None."""
    return unsupported_reason(implementation, **shape) is None


_LARGEST = float(np.finfo(np.float32).max)


class Call:
    """The checked and completed arguments of an attend."""

    def __init__(self, tokens, layer, seq_lengths, options: Options, name: str):
        self.tokens, self.layer, self.seq_lengths = tokens, layer, seq_lengths
        self.options, self.name = options, name


def prepare(
    query, key, value, cache, layer, query_seq_lengths, scale, soft_cap, window, sinks,
    implementation, num_ctas,
) -> Call:  # fmt: skip
    """Checks the arguments of an attend; of `query`, shape and dtype are all that counts."""
    if sinks is not None:
        raise NotImplementedError("`sinks` is reserved and not supported yet; pass None.")
    _checks.check_cache(cache)
    tokens, heads = _checks.check_query(query, cache)
    if key is not None:
        _check_new_tokens(key, value, cache, tokens)
    if soft_cap is not None and not 0 < soft_cap <= _LARGEST:
        raise ValueError(f"`logits_soft_cap` should be positive or None, but got {soft_cap!r}.")
    scale = 1.0 / math.sqrt(cache.head_dim) if scale is None else float(scale)
    if not abs(scale) <= _LARGEST:
        raise ValueError(f"`scale` should be finite, but got {scale}.")
    options = Options(
        cache.storage, scale, float(soft_cap or 0.0), _checks.check_window(window, cache.window),
        _checks.check_num_ctas(num_ctas),
    )  # fmt: skip
    return Call(
        tokens,
        _checks.check_layer(layer, cache.num_layers),
        _seq_lengths(query_seq_lengths, cache, tokens),
        options,
        choose(implementation, _request(cache, heads)).name,
    )


def _check_new_tokens(key, value, cache, tokens: int) -> None:
    sizes = (cache.batch, tokens, cache.num_kv_heads, cache.head_dim)
    _checks.check_array("key", key, "BTKH", sizes, cache.dtype)
    _checks.check_array("value", value, "BTKH", sizes, cache.dtype)


def _seq_lengths(query_seq_lengths, cache, tokens: int):
    if query_seq_lengths is None:
        return jnp.full((cache.batch,), tokens, jnp.int32)
    return _checks.check_rows_argument("query_seq_lengths", query_seq_lengths, cache.batch)


def _request(cache: KVCache, heads: int) -> Request:
    platform = platform_of(cache.pages, cache.mesh)
    return Request(
        platform, cache.placement, cache.dtype, cache.head_dim, heads, cache.num_kv_heads
    )


def _decode(cache, query, key, value, layer, seq_lengths, options, name):
    out, lse = _attend(cache, query, key, value, layer, seq_lengths, options, name)
    return out, lse, run_append(cache, key, value, layer, seq_lengths, out, name)


def _attend(cache, query, key, value, layer, seq_lengths, options, name):
    if key is None:
        key = value = jnp.zeros((cache.batch, 0, cache.num_kv_heads, cache.head_dim), cache.dtype)
    query, key, value = (refuse_gradients(x) for x in (query, key, value))
    specs = CacheSpecs(cache.batch_axis, cache.kv_head_axis)

    def run(query, key, value, pages, *rows):
        return get(name).attend(query, key, value, pages, Rows(*rows), options)

    return over_mesh(
        run, cache.mesh, (specs.tokens,) * 3 + row_specs(specs), (specs.tokens, specs.lse)
    )(query, key, value, cache.pages, cache.page_table, cache.lengths, seq_lengths, layer)


def run_append(cache, key, value, layer, seq_lengths, after, name) -> KVCache:
    """`append` of checked arguments, to be traced."""
    key, value = refuse_gradients(key), refuse_gradients(value)
    specs = CacheSpecs(cache.batch_axis, cache.kv_head_axis)
    admitted, overflowed = cache.admit(seq_lengths, key.shape[1])
    overflowed |= ((layer < 0) | (layer >= cache.num_layers)) & (seq_lengths != 0)
    key, value, lengths, admitted = _rows.kept_tokens(cache, key, value, admitted)
    storage = cache.storage
    after = key if after is None else after
    split_after = after.ndim == 4 and after.shape[:2] == key.shape[:2]
    after_spec = specs.tokens if split_after else specs.scalar

    def run(key, value, after, pages, *rows):
        return get(name).append(pages, key, value, Rows(*rows), storage, after)

    in_specs = (specs.tokens, specs.tokens, after_spec, *row_specs(specs))
    pages = over_mesh(run, cache.mesh, in_specs, specs.pages)(
        key, value, after, cache.pages, cache.page_table, lengths, admitted, layer
    )
    return cache.replace(pages=pages, overflowed=overflowed)


def row_specs(specs: CacheSpecs):
    """Of the pages and the `Rows` of a call."""
    return (specs.pages, specs.page_table, specs.lengths, specs.lengths, specs.scalar)


# Traced or not, the work is done in a jitted function: one that is merely traced by vmap would
# otherwise dispatch each call by itself, and copy a host operand to the device first.
_STATIC = ("options", "name")
_traced_attend = jax.jit(_attend, inline=True, static_argnames=_STATIC)
_traced_append = jax.jit(run_append, inline=True, static_argnames="name")
_traced_decode = jax.jit(_decode, inline=True, static_argnames=_STATIC)
_eager_decode = jax.jit(_decode, donate_argnames="cache", static_argnames=_STATIC)
_eager_append = jax.jit(run_append, donate_argnames="cache", static_argnames="name")


@jax.custom_jvp
def refuse_gradients(x):
    """x; a clear error where it would be differentiated."""
    return x


@refuse_gradients.defjvp
def _no_gradient(primals, tangents):
    del primals, tangents
    raise NotImplementedError(
        "Attention over a KVCache has no gradient: it is an inference path. Train with "
        "jax.nn.dot_product_attention over whole sequences (the drop-in modules do so with "
        "decode=False)."
    )
