"""Flax's attention of whole sequences, for what its own module cannot be asked to do."""

from __future__ import annotations

import inspect

import flax.linen as nn
import jax.numpy as jnp


def attend_whole(
    module: nn.MultiHeadDotProductAttention, query, key, value, *, mask, deterministic, dropout_rng,
    sow_weights: bool,
):  # fmt: skip
    """The module's `attention_fn` as `flax.linen` calls it, with each KV head repeated G times.

    Args:
      module: whose options hold; bound, so that it can sow and draw random numbers.
      query: `[batch..., T, N, H]`.
      key: `[batch..., T, K, H]`.
      value: `[batch..., T, K, H]`.
      mask: as the module was called, and so are the others.
      deterministic: no dropout.
      dropout_rng: default the module's own stream.
      sow_weights: store the weights in the collection `intermediates`.

    Returns:
      `[batch..., T, N, H]`.
    """
    groups = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, groups, axis=-2) for x in (key, value))
    if module.dropout_rate > 0.0:
        deterministic = nn.merge_param("deterministic", module.deterministic, deterministic)
        if not deterministic and dropout_rng is None:
            dropout_rng = module.make_rng("dropout")
    else:
        deterministic = True
    options = {
        "mask": mask,
        "deterministic": deterministic,
        "dropout_rng": dropout_rng,
        "dropout_rate": module.dropout_rate,
        "broadcast_dropout": module.broadcast_dropout,
        "dtype": module.dtype,
        "precision": module.precision,
        "force_fp32_for_softmax": module.force_fp32_for_softmax,
        "qk_attn_weights_einsum": _make(module.qk_attn_weights_einsum_cls),
        "attn_weights_value_einsum": _make(module.attn_weights_value_einsum_cls),
    }
    known = inspect.signature(module.attention_fn).parameters
    options = {name: x for name, x in options.items() if name in known}
    if sow_weights:
        options["module"] = module
    return module.attention_fn(query, key, value, **options)


def _make(cls):
    return None if cls is None else cls()
