"""The calls of directkv_jax that a benchmark case times, in the form its baselines have too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import directkv_jax
from directkv_jax.bench.attention_cases import Case


def refuse_unsupported(case: Case) -> None:
    """Raises what `attend` would, before memory is allocated for it.

    Raises:
      NotImplementedError: the implementation cannot serve the case; names what it can.
    """
    reason = directkv_jax.unsupported_reason(
        case.implementation, dtype=case.dtype, head_dim=case.head_dim,
        num_query_heads=case.query_heads, num_kv_heads=case.kv_heads, placement=case.placement,
    )  # fmt: skip
    if reason:
        raise NotImplementedError(
            f'implementation="{case.implementation}" cannot do this: {reason}'
        )


def new_tokens(case: Case) -> list[jax.Array]:
    """Queries `[B, T, N, H]`, keys and values `[B, T, K, H]`, standard normal."""
    dtype = jnp.dtype(case.dtype)
    arrays = []
    for seed, heads in enumerate((case.query_heads, case.kv_heads, case.kv_heads)):
        shape = (case.batch, case.query_tokens, heads, case.head_dim)
        arrays.append(jax.random.normal(jax.random.key(seed), shape, dtype))
    return arrays


def attend_last(case: Case) -> Callable[..., Any]:
    """(query, cache, key, value) -> out, over the last layer: what the oracle checks."""
    options = _options(case)

    def attend(query, cache, key, value):
        return directkv_jax.attend(query, cache, key, value, layer=case.layers - 1, **options)

    return attend


def all_layers(case: Case) -> Callable[..., Any]:
    """(query, cache, key, value) -> out, or (out, cache) if the case appends.

    The result of one layer is the query of the next, so the calls cannot overlap.
    """
    options = _options(case)

    def attend(query, cache, key, value):
        for layer in range(case.layers):
            query = directkv_jax.attend(query, cache, key, value, layer=layer, **options)
        return query

    def decode(query, cache, key, value):
        for layer in range(case.layers):
            query, cache = directkv_jax.decode_attention(
                query, key, value, cache, layer=layer, **options
            )
        return query, cache

    return decode if case.appends else attend


def _options(case: Case) -> dict[str, Any]:
    return {"implementation": case.implementation, "num_ctas": case.num_ctas}
