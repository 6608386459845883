"""The `cache` collection of a linen model, without computing its parameters."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from directkv_jax import _flax
from directkv_jax.cache import KVCache


def init_cache(module: nn.Module, *args: Any, rngs=None, **kwargs: Any):
    """The empty `cache` collection of a module that decodes; computes no parameters.

    Args:
      module: a linen module that holds attention modules with decode=True.
      *args: arrays, or `jax.ShapeDtypeStruct`s, for `module.init`: inputs of max_length tokens.
      rngs: for `module.init`; default one key.
      **kwargs: for `module.init`; not traced, so flags go here.

    Returns:
      The collection: every `KVCache` allocated where it was asked for, all else zeros.

    Raises:
      ValueError: the module keeps no cache, or stacks its caches by a lifted transformation.
    """
    rngs = jax.random.key(0) if rngs is None else rngs
    abstract = jax.eval_shape(lambda rngs, args: module.init(rngs, *args, **kwargs), rngs, args)
    if "cache" not in abstract:
        raise ValueError(
            f"{type(module).__name__} should keep a `cache` collection, but has only "
            f"{sorted(abstract)}. Construct it with decode=True."
        )
    return jax.tree.map(_allocate, abstract["cache"], is_leaf=_is_cache)


def _is_cache(x) -> bool:
    return isinstance(x, KVCache)


def _allocate(x):
    if not _is_cache(x):
        return jnp.zeros(x.shape, x.dtype)
    if x.pages.ndim != 4:
        raise ValueError(
            f"A KVCache should have pages of 4 dimensions, but nn.scan or nn.vmap made them "
            f"{x.pages.shape}: a stacked host cache cannot be sliced in place. Carry one cache "
            "with num_layers=L through the scan and pass it to each layer, as `cache` and `layer`."
        )
    return _flax.empty_like(x)
