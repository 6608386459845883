"""Multi-head attention for linen with its cache in the `cache` collection."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype
from jax.sharding import Mesh

from directkv_jax import _flax
from directkv_jax.cache import KVCache
from directkv_jax.linen._whole import attend_whole

_REMEDY = (
    "Make the `cache` collection with directkv_jax.linen.init_cache(model, dummy) or model.init."
)

_CARRY_REMEDY = (
    "As the carry of an nn.scan it keeps its type with check_constancy_invariants=False; Flax's "
    "check drops it."
)


def _option(default: Any) -> Any:
    return dataclasses.field(default=default, kw_only=True)


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """Multi-head attention whose decoding reads keys and values from host memory.

    Example::

      attention = MultiHeadDotProductAttention(num_heads=8, decode=True)
      variables = attention.init(jax.random.key(0), jnp.zeros((4, 4096, 512)))
      y, state = attention.apply(variables, x, mutable=["cache"])  # x [4, T, 512]: T new tokens

    Attributes, beyond those of `flax.linen.MultiHeadDotProductAttention`, all keyword-only:
      num_kv_heads: K, heads of keys and values; default num_heads. Fewer make kernels of `key` and
        `value` `[features, K, head_dim]`, as in `flax.nnx`.
      cache_placement: "host" or "device", where the cache is allocated.
      page_size: tokens per page of the cache; capacities round up to whole pages.
      implementation: of `directkv_jax.decode_attention`.
      mesh: a mesh to split the cache over, with the axes below.
      kv_head_axis: its axis for KV heads.
      batch_axis: its axis for rows.
    """

    num_kv_heads: int | None = _option(None)
    cache_placement: str = _option("host")
    page_size: int = _option(64)
    implementation: str | None = _option(None)
    mesh: Mesh | None = _option(None)
    kv_head_axis: str | None = _option(None)
    batch_axis: str | None = _option(None)

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        query_seq_lengths=None,
        cache: KVCache | None = None,
        layer=0,
    ):
        """Attends as Flax does, or decodes: with decode=True, or with a `cache` of the caller's.

        Decoding takes T new tokens for each row and appends them.

        Args:
          inputs_q: `[batch..., T, features]`; to `init`, max_length tokens.
          inputs_k: `[batch..., T, features]`, by default `inputs_q`.
          inputs_v: `[batch..., T, features]`, by default `inputs_k`.
          inputs_kv: both of these at once; deprecated by Flax.
          mask: Flax's; refused when decoding.
          deterministic: Flax's; must be True when decoding with a dropout_rate.
          dropout_rng: Flax's.
          sow_weights: Flax's; refused when decoding.
          query_seq_lengths: int32 `[batch...]`, how many of the T tokens of each row are valid.
          cache: a cache to use in place of the module's own, as a scan over layers needs it; called
            eagerly it is consumed. Its lengths do not change: the caller advances it once, after
            all layers. `init` leaves it alone. The module's own is advanced by every call.
          layer: which layer of `cache`, an int or a traced scalar.

        Returns:
          `[batch..., T, features]`; with `cache` the pair of that and the new cache. A row whose
          tokens do not all fit stores none of them and is flagged in `overflowed`.

        Raises:
          NotImplementedError: decoding cannot honour an argument: `mask`, `sow_weights`, active
            dropout, a custom `attention_fn` or einsum.
          ValueError: a cache that was donated, lost its type or is immutable, or, eagerly, full.
        """
        decodes = self.decode or cache is not None
        if decodes:
            self._refuse(mask, deterministic, sow_weights)
        else:
            _flax.refuse_outside_decode(query_seq_lengths=query_seq_lengths)
        whole = functools.partial(
            attend_whole, self, mask=mask, deterministic=deterministic, dropout_rng=dropout_rng,
            sow_weights=sow_weights,
        )  # fmt: skip
        if not decodes and self.num_kv_heads in (None, self.num_heads):
            flax_call: Any = super().__call__  # its overloads cannot be passed through
            return flax_call(
                inputs_q, inputs_k, inputs_v, inputs_kv=inputs_kv, mask=mask,
                deterministic=deterministic, dropout_rng=dropout_rng, sow_weights=sow_weights,
            )  # fmt: skip
        query, key, value = self._project(inputs_q, *_keys(inputs_q, inputs_k, inputs_v, inputs_kv))
        new = {
            "query_seq_lengths": query_seq_lengths, "layer": layer,
            "implementation": self.implementation,
        }  # fmt: skip
        if not decodes:
            x = whole(query, key, value)
        elif cache is None:
            x = self._decode_held(query, key, value, whole, new)
        elif self.is_initializing():
            x = whole(query, key, value)
        else:
            cache = _flax.check_held(cache, _CARRY_REMEDY)
            x, cache = _flax.decode(query, key, value, cache, **new)
        out = self._out(x, self.out_features or inputs_q.shape[-1])
        return out if cache is None else (out, cache)

    def _decode_held(self, query, key, value, whole, new):
        options = _flax.CacheOptions(
            self.cache_placement, self.page_size, self.mesh, self.kv_head_axis, self.batch_axis
        )
        is_initialized = self.has_variable("cache", "kv_cache")
        if is_initialized and not self.is_mutable_collection("cache"):
            raise ValueError(
                "The `cache` collection should be mutable when decoding, but is not. Call "
                'apply(variables, x, mutable=["cache"]) and go on with the cache it returns.'
            )
        held = self.variable(
            "cache", "kv_cache", options.create, key.shape[:-3], key.shape[-3],
            num_kv_heads=key.shape[-2], head_dim=key.shape[-1], dtype=key.dtype,
        )  # fmt: skip
        if not is_initialized:  # the dummy that gives the size: as in Flax, nothing is stored
            return whole(query, key, value)
        cache = _flax.check_held(held.value, _REMEDY)
        x, cache = _flax.decode(query, key, value, cache, **new)
        held.value = _flax.advance(cache, query.shape[-3], new["query_seq_lengths"])
        return x

    def _refuse(self, mask, deterministic, sow_weights) -> None:
        _flax.refuse_in_decode(
            mask=mask,
            sow_weights=sow_weights,
            attention_fn=self.attention_fn is not nn.dot_product_attention,
            qk_attn_weights_einsum_cls=self.qk_attn_weights_einsum_cls,
            attn_weights_value_einsum_cls=self.attn_weights_value_einsum_cls,
        )
        if self.dropout_rate > 0.0:
            deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
            _flax.refuse_in_decode(dropout_rate=not deterministic)

    def _project(self, inputs_q, inputs_k, inputs_v):
        kv_heads = self.num_kv_heads or self.num_heads
        features = self.qkv_features or inputs_q.shape[-1]
        if features % self.num_heads or self.num_heads % kv_heads:
            raise ValueError(
                f"`num_heads` should divide qkv_features={features} and be a multiple of "
                f"num_kv_heads={kv_heads}, but is {self.num_heads}."
            )
        dense = functools.partial(
            self._dense, self.kernel_init, self.bias_init, self.qkv_dot_general,
            self.qkv_dot_general_cls,
        )  # fmt: skip
        head_dim = features // self.num_heads
        query = dense("query", (self.num_heads, head_dim), -1)(inputs_q)
        key = dense("key", (kv_heads, head_dim), -1)(inputs_k)
        value = dense("value", (kv_heads, head_dim), -1)(inputs_v)
        if self.normalize_qk:
            norm = functools.partial(
                nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
            )
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        return promote_dtype(query, key, value, dtype=self.dtype)

    def _out(self, x, features: int):
        dense = self._dense(
            self.out_kernel_init or self.kernel_init, self.out_bias_init or self.bias_init,
            self.out_dot_general, self.out_dot_general_cls, "out", features, (-2, -1),
        )  # fmt: skip
        return dense(x)

    def _dense(self, kernel_init, bias_init, dot_general, dot_general_cls, name, features, axis):
        return nn.DenseGeneral(
            features=features, axis=axis, dtype=self.dtype, param_dtype=self.param_dtype,
            kernel_init=kernel_init, bias_init=bias_init, use_bias=self.use_bias,
            precision=self.precision, dot_general=dot_general, dot_general_cls=dot_general_cls,
            name=name,
        )  # fmt: skip


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under Flax's other name, which auto-named parameters carry."""


def _keys(inputs_q, inputs_k, inputs_v, inputs_kv):
    """Flax's defaults for (inputs_k, inputs_v)."""
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError(
                "`inputs_kv` should not be given together with `inputs_k` or `inputs_v`."
            )
        return inputs_kv, inputs_kv
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError("`inputs_k` should be given when `inputs_v` is.")
        inputs_k = inputs_q
    return inputs_k, inputs_k if inputs_v is None else inputs_v
