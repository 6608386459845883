"""`flax.nnx.MultiHeadAttention` decoding through a KV cache in host memory.

Parameters have Flax's names and shapes, so checkpoints load both ways; outside decoding everything
is Flax's own. A decoding module holds its cache in Flax's own place, an `nnx.Cache` variable, which
checkpoints of `nnx.Param` leave out.

Called eagerly the module updates itself. Under `jax.jit` the cache must be donated, and only the
cache, or XLA copies all of it at every step, host to host and without a word. Split it off::

  model = nnx.view(model, decode=True, batch_size=4, max_length=4096)
  graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(cache, rest, x):
      model = nnx.merge(graphdef, cache, rest)
      y = model(x)
      return nnx.state(model, nnx.Cache), y

  cache, y = step(cache, rest, x)  # the old `cache` is gone, and so is the one inside `model`

Give every other jit a model without cache: `nnx.view(model, decode=False)`. `nnx.jit` takes the
same arguments and leaves the cache in place, but returns, and so copies, every parameter each time.

A stack of layers shares one cache with `num_layers=L`: the cache is the carry of the scan, the
layer index its xs, and nothing is held by the module::

  @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
  def layers(carry, block, layer):
      x, cache = carry
      y, cache = block.attention(x, cache=cache, layer=layer)
      return x + y, cache

  x, cache = layers((x, cache), blocks, jnp.arange(L))
  cache = cache.advance(x.shape[1])  # once per step, after all layers

To act on the held caches of a whole model, map over the state: `jax.tree.map(lambda c: c.reset(),
nnx.state(model, nnx.Cache), is_leaf=lambda x: isinstance(x, KVCache))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import Mesh

from directkv_jax import _flax
from directkv_jax.cache import KVCache

__all__ = ["MultiHeadAttention"]

_REMEDY = (
    "Make the cache with `init_cache`, `nnx.view(model, decode=True, batch_size=..., "
    "max_length=...)` or KVCache.create."
)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Multi-head attention whose decoding reads keys and values from host memory.

    Example::

      attention = directkv_jax.nnx.MultiHeadAttention(8, 512, decode=True, rngs=nnx.Rngs(0))
      attention.init_cache((4, 4096, 512))  # [batch..., max_length, features]
      y = attention(x)  # x [4, T, 512]: T new tokens for each row, causal among themselves

    Args:
      *args: of `flax.nnx.MultiHeadAttention`.
      cache_placement: "host" or "device", where `init_cache` and `nnx.view` allocate.
      page_size: tokens per page of the cache; capacities round up to whole pages.
      implementation: of `directkv_jax.decode_attention`.
      mesh: a mesh to split the cache over, with the axes below.
      kv_head_axis: its axis for KV heads.
      batch_axis: its axis for rows.
      **kwargs: of `flax.nnx.MultiHeadAttention`.

    Attributes:
      kv_cache: `nnx.Cache` of a `KVCache` with one layer, or None.
    """

    def __init__(
        self,
        *args: Any,
        cache_placement: str = "host",
        page_size: int = 64,
        implementation: str | None = None,
        mesh: Mesh | None = None,
        kv_head_axis: str | None = None,
        batch_axis: str | None = None,
        **kwargs: Any,
    ):
        self.cache_options = _flax.CacheOptions(
            cache_placement, page_size, mesh, kv_head_axis, batch_axis
        )
        self.implementation = implementation
        super().__init__(*args, **kwargs)
        self.kv_cache: nnx.Cache[KVCache] | None = nnx.data(None)

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding=None,
        qkv_sharding=None,
        query_seq_lengths=None,
        cache: KVCache | None = None,
        layer=0,
        **flax_options: Any,
    ):
        """Attends as Flax does, or decodes: with decode=True, or with a `cache` of the caller's.

        Decoding takes T new tokens for each row and appends them.

        Args:
          inputs_q: `[batch..., T, features]`.
          inputs_k: `[batch..., T, features]`, by default `inputs_q`.
          inputs_v: `[batch..., T, features]`, by default `inputs_k`.
          mask: Flax's; refused when decoding.
          deterministic: Flax's; must be True when decoding with a dropout_rate.
          rngs: Flax's, for dropout.
          sow_weights: Flax's; refused when decoding.
          decode: in place of the module's own.
          is_causal: Flax's; decoding is always causal.
          out_sharding: Flax's, of the output projection.
          qkv_sharding: Flax's, of the other projections.
          query_seq_lengths: int32 `[batch...]`, how many of the T tokens of each row are valid.
          cache: a cache to use in place of the module's own, as a scan over layers needs it; called
            eagerly it is consumed. Its lengths do not change: the caller advances it once, after
            all layers. The module's own is advanced by every call.
          layer: which layer of `cache`, an int or a traced scalar.
          **flax_options: of newer Flax versions.

        Returns:
          `[batch..., T, features]`; with `cache` the pair of that and the new cache. A row whose
          tokens do not all fit stores none of them and is flagged in `overflowed`.

        Raises:
          NotImplementedError: decoding cannot honour an argument: `mask`, `sow_weights`, active
            dropout, a custom `attention_fn`, `input_positions`.
          ValueError: no cache, one that was donated or lost its type, or, eagerly, a full one.
        """
        if decode is False or (cache is None and not (self.decode if decode is None else decode)):
            _flax.refuse_outside_decode(query_seq_lengths=query_seq_lengths, cache=cache)
            return super().__call__(
                inputs_q, inputs_k, inputs_v, mask=mask, deterministic=deterministic, rngs=rngs,
                sow_weights=sow_weights, decode=decode, is_causal=is_causal,
                out_sharding=out_sharding, qkv_sharding=qkv_sharding, **flax_options,
            )  # fmt: skip
        self._refuse(mask, deterministic, sow_weights, flax_options)
        query, key, value = self._project(inputs_q, inputs_k, inputs_v, qkv_sharding)
        options = {"query_seq_lengths": query_seq_lengths, "implementation": self.implementation}
        if cache is not None:
            cache = _flax.check_held(cache, _REMEDY)
            x, cache = _flax.decode(query, key, value, cache, layer=layer, **options)
            return self.out(x, out_sharding=out_sharding), cache
        if self.kv_cache is None:
            raise ValueError(f"This module decodes, but has no cache. {_REMEDY}")
        held = _flax.check_held(self.kv_cache.get_value(), _REMEDY)
        x, held = _flax.decode(query, key, value, held, layer=layer, **options)
        self.kv_cache.set_value(_flax.advance(held, query.shape[-3], query_seq_lengths))
        return self.out(x, out_sharding=out_sharding)

    def _refuse(self, mask, deterministic, sow_weights, flax_options) -> None:
        custom = self.attention_fn is not nnx.dot_product_attention
        _flax.refuse_in_decode(
            mask=mask, sow_weights=sow_weights, attention_fn=custom, **flax_options
        )
        if self.dropout_rate > 0.0:
            deterministic = self.deterministic if deterministic is None else deterministic
            _flax.refuse_in_decode(dropout_rate=not deterministic)

    def _project(self, inputs_q, inputs_k, inputs_v, sharding):
        if inputs_k is None and inputs_v is not None:
            raise ValueError("`inputs_k` should be given when `inputs_v` is.")
        if inputs_q.shape[-1] != self.in_features:
            raise ValueError(
                f"`inputs_q` should have in_features={self.in_features} features, but has shape "
                f"{inputs_q.shape}."
            )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        query = self.query(inputs_q, out_sharding=sharding)
        key = self.key(inputs_k, out_sharding=sharding)
        value = self.value(inputs_v, out_sharding=sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        return promote_dtype((query, key, value), dtype=self.dtype)

    def init_cache(self, input_shape, dtype=None) -> None:
        """Allocates an empty cache in the module's `nnx.Cache` variable `kv_cache`.

        Args:
          input_shape: `(batch..., max_length, features)`.
          dtype: of keys and values; default the module's dtype, else its `param_dtype`.
        """
        *batch_dims, max_length, _ = input_shape
        self._allocate(batch_dims, max_length, dtype)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ):
        """Class method used by ``nnx.view``.

        Args:
          deterministic: if True, the module is set to deterministic mode.
          decode: if True, the module is set to decode mode; if False, the view has no cache.
          batch_size: with max_length, a view that decodes gets a new, empty cache of this size.
          max_length: tokens each row of that cache can hold.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if decode is False:
            self.kv_cache = nnx.data(None)
        if not self.decode or (batch_size is None and max_length is None):
            return
        if batch_size is None or max_length is None:
            missing = "batch_size" if batch_size is None else "max_length"
            raise TypeError(f"`{missing}` should be given too when a view allocates a cache.")
        self._allocate((batch_size,) if isinstance(batch_size, int) else batch_size, max_length)

    def _allocate(self, batch_dims, max_length: int, dtype=None) -> None:
        cache = self.cache_options.create(
            batch_dims,
            max_length,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype or self.dtype or self.param_dtype,
        )
        self.kv_cache = nnx.Cache(cache)
