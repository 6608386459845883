"""The exact result of a benchmark case, in float32 by NumPy, and how far a result is from it."""

from __future__ import annotations

import math

import numpy as np


def attention(query, keys, values, counts, fresh=None) -> np.ndarray:
    """Decode attention over a multiset of tokens.

    Args:
      query: `[B, T, N, H]`.
      keys: `[C, K, H]`, the distinct cached tokens, the same for all rows.
      values: `[C, K, H]`.
      counts: `[B, C]`, how often each row sees each of them.
      fresh: (keys, values) of the new tokens, `[B, T, K, H]`, seen causally; None: there are none.

    Returns:
      float32 `[B, T, N, H]`.
    """
    query, keys, values = (np.asarray(x, np.float32) for x in (query, keys, values))
    batch, tokens, heads, dim = query.shape
    group = heads // keys.shape[1]
    keys, values = np.moveaxis(keys, 1, 0), np.moveaxis(values, 1, 0)  # [K, C, H]
    out = np.empty((batch, tokens, heads, dim), np.float32)
    for b in range(batch):
        # [K, T * G, H]: the queries of a KV head, token by token.
        q = (
            query[b]
            .reshape(tokens, -1, group, dim)
            .transpose(1, 0, 2, 3)
            .reshape(-1, tokens * group, dim)
        )
        logits = q @ keys.swapaxes(1, 2) / math.sqrt(dim)
        weights, row_values = np.broadcast_to(counts[b], logits.shape), values
        if fresh is not None:
            new_k, new_v = (np.moveaxis(np.asarray(x[b], np.float32), 1, 0) for x in fresh)
            logits = np.concatenate([logits, q @ new_k.swapaxes(1, 2) / math.sqrt(dim)], -1)
            causal = np.repeat(np.tri(tokens, dtype=np.float32), group, 0)
            causal = np.broadcast_to(causal, (len(q), *causal.shape))
            weights = np.concatenate([weights, causal], -1)
            row_values = np.concatenate([values, new_v], 1)
        seen = weights > 0
        top = np.where(seen, logits, -np.inf).max(-1, keepdims=True)
        weights = np.where(seen, weights * np.exp(np.minimum(logits - top, 0)), 0)
        row = weights @ row_values / weights.sum(-1, keepdims=True)
        out[b] = (
            row.reshape(-1, tokens, group, dim).transpose(1, 0, 2, 3).reshape(tokens, heads, dim)
        )
    return out


def errors(out, exact: np.ndarray) -> dict[str, float]:
    """max_abs_error, and relative_error as the norm of the difference over that of `exact`.

    Raises:
      FloatingPointError: `out` is not finite.
    """
    out = np.asarray(out, np.float32)
    if not np.isfinite(out).all():
        raise FloatingPointError(f"{np.count_nonzero(~np.isfinite(out))} outputs are not finite")
    difference = out - exact
    return {
        "max_abs_error": float(np.abs(difference).max()),
        "relative_error": float(np.linalg.norm(difference) / np.linalg.norm(exact)),
    }
