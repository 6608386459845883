"""A float64 NumPy oracle that shares no code with the package: loops over rows, heads, queries.

It knows nothing of pages. `keys` and `values` hold the cached tokens of each row in order; slots at
or beyond the length are never looked at.
"""

from __future__ import annotations

import math

import numpy as np

# Floors of the error rule, for queries whose low-precision reference happens to be nearly exact.
# float32: unit roundoff 6e-8 times the square root of a few hundred summands, with a fast exp.
# bfloat16, float16: twice the largest relative error of rounding the output alone (2^-9, 2^-12
# with the mantissa in [1, 2) gives 2e-3, 2.4e-4), since one-token rows round nothing else.
FLOOR = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 6e-4}

# Absolute error of the log-sum-exp. 3e-5 is float32 rounding of logits of up to about 10, with a
# fast exp and tanh. In 16 bits an implementation may add up the weights as it multiplies them,
# rounded to the dtype (then they sum to one exactly): a relative error of the sum, so an absolute
# one of its logarithm, of at most the unit roundoff, 2^-9 and 2^-12.
LSE_TOLERANCE = {"float32": 3e-5, "bfloat16": 2**-9 + 3e-5, "float16": 2**-12 + 3e-5}


def attend(
    query, keys, values, lengths, key=None, value=None, *, seq_lengths=None, scale=None,
    soft_cap=None, window=None, weight_dtype=None,
):  # fmt: skip
    """(out float64 `[B, T, N, H]`, lse float64 `[B, T, N]`).

    Args:
      query: `[B, T, N, H]`.
      keys: `[B, S, K, H]`, cached; row b holds `lengths[b]` of them. values likewise.
      key: `[B, T, K, H]`, fresh and causal, or None. value likewise.
      seq_lengths: how many of the T queries of each row are valid.
      window: the left window, or None.
      weight_dtype: round logits to float32, softmax weights and the output to this dtype: what a
        careful low-precision implementation cannot avoid.
    """
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    batch, tokens, heads, dim = query.shape
    group = heads // keys.shape[2]
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    out = np.zeros((batch, tokens, heads, dim))
    lse = np.full((batch, tokens, heads), -np.inf)
    for b in range(batch):
        length = int(lengths[b])
        for t in range(tokens if seq_lengths is None else int(seq_lengths[b])):
            first = 0 if window is None else max(0, length + t - window)
            first_fresh = 0 if window is None else max(0, t - window)
            for n in range(heads):
                k, v = keys[b, first:length, n // group], values[b, first:length, n // group]
                if key is not None:
                    fresh = (b, slice(first_fresh, t + 1), n // group)
                    k = np.concatenate([k, np.asarray(key[fresh], np.float64)])
                    v = np.concatenate([v, np.asarray(value[fresh], np.float64)])
                if len(k):
                    out[b, t, n], lse[b, t, n] = _softmax_sum(
                        k @ query[b, t, n] * scale, v, soft_cap, weight_dtype
                    )
    return out, lse


def _softmax_sum(logits, v, soft_cap, weight_dtype):
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    if weight_dtype is not None:
        logits = logits.astype(np.float32).astype(np.float64)
    top = logits.max()
    weights = np.exp(logits - top)
    total = weights.sum()
    if weight_dtype is not None:
        weights = weights.astype(weight_dtype).astype(np.float64)
    result = weights @ v / total
    if weight_dtype is not None:
        result = result.astype(weight_dtype).astype(np.float64)
    return result, top + math.log(total)


def check(out, lse, dtype, *args, **kwargs) -> None:
    """Asserts the error rule, query by query: at most 3 times the low-precision reference's error.

    Args:
      out: the result under test, `[B, T, N, H]`.
      lse: its log-sum-exp `[B, T, N]`, or None.
      dtype: dtype of the inputs. The other arguments are those of `attend`.
    """
    compare(out, lse, dtype, attend(*args, **kwargs), attend(*args, **kwargs, weight_dtype=dtype))


def compare(out, lse, dtype, expected, lowered, floor: float | None = None) -> None:
    """As `check`, of two results of `attend`: the exact one and the low-precision reference.

    `floor` replaces that of the dtype. The log-sum-exp may be off by 3 times the reference's too.
    """
    expected, expected_lse = expected
    lowered, lowered_lse = lowered
    out = np.asarray(out, np.float64)
    assert out.shape == expected.shape
    assert np.isfinite(out).all(), f"NaN or inf at queries {_where(~np.isfinite(out))}"
    empty = np.isneginf(expected_lse)
    assert (out[empty] == 0).all(), "a query that sees nothing should give zeros"
    norm = np.linalg.norm(expected, axis=(2, 3))
    error = _relative(out - expected, norm)
    limit = np.maximum(
        floor or FLOOR[np.dtype(dtype).name], 3 * _relative(lowered - expected, norm)
    )
    assert (error <= limit).all(), (
        f"relative error {error.max():.2e} at (row, query) {_where(error > limit)}, limit "
        f"{limit[error > limit].min():.2e}"
    )
    if lse is not None:
        lse = np.asarray(lse, np.float64)
        assert (np.isneginf(lse) == empty).all(), "lse should be -inf exactly where empty"
        difference = np.abs(lse[~empty] - expected_lse[~empty])
        reference = np.abs(lowered_lse[~empty] - expected_lse[~empty])
        tolerance = np.maximum(LSE_TOLERANCE[np.dtype(dtype).name], 3 * reference)
        assert (difference <= tolerance).all(), f"lse is off by {difference.max():.2e}"


def _relative(difference, norm):
    return np.linalg.norm(difference, axis=(2, 3)) / np.where(norm == 0, 1, norm)


def _where(mask) -> list:
    return np.unique(np.argwhere(mask)[:, :2], axis=0)[:8].tolist()
