"""The float32 oracle: the definition of the result, in as few lines as it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from directkv_jax.implementations import _paged
from directkv_jax.implementations._base import Options, Request, Rows


class ReferenceImplementation:
    """Float32 at highest precision, one whole softmax per query. For checking, not for speed."""

    name = "reference"
    append = staticmethod(_paged.append)
    read_pages = staticmethod(_paged.read_pages)
    write_pages = staticmethod(_paged.write_pages)

    def unsupported_reason(self, request: Request) -> None:
        """None: it serves every request."""

    def attend(self, query, key, value, pages, rows: Rows, options: Options):
        """Row by row: logits, mask, softmax, weighted sum."""
        layout = options.storage.layout
        group = query.shape[2] // layout.num_kv_heads
        cached_k, cached_v = _paged.read_rows(pages, rows, layout)
        keys = jnp.concatenate([cached_k, key], 1).astype(jnp.float32)  # [B, S, K, H]
        values = jnp.concatenate([cached_v, value], 1).astype(jnp.float32)
        seen = _paged.visible(
            rows, query.shape[1], key.shape[1], cached_k.shape[1], options.window_left
        )
        ever = seen.any(1)[:, :, None, None]  # slots nobody sees may hold anything, NaN included
        keys, values = jnp.where(ever, keys, 0), jnp.where(ever, values, 0)
        keys, values = jnp.repeat(keys, group, 2), jnp.repeat(values, group, 2)
        with jax.default_matmul_precision("highest"):
            logits = jnp.einsum("btnh,bsnh->btns", query.astype(jnp.float32), keys) * options.scale
            if options.soft_cap > 0:
                logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
            logits = jnp.where(seen[:, :, None, :], logits, -jnp.inf)
            lse = jax.nn.logsumexp(logits, axis=-1)
            weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
            out = jnp.einsum("btns,bsnh->btnh", weights, values)
        return poison(out.astype(query.dtype), lse, rows, pages, options)


def poison(out, lse, rows: Rows, pages, options: Options):
    """NaN for the valid queries of rows whose lengths, layer or page ids are out of range."""
    tokens = out.shape[1]
    ok = _paged.sound(
        rows, tokens, pages.shape[0], pages.shape[1], options.storage.layout, options.window_left
    )
    seq = rows.seq_lengths
    query_valid = jnp.arange(tokens)[None, :] < seq[:, None]
    query_valid |= ((seq < 0) | (seq > tokens))[:, None]
    bad = ~ok[:, None] & query_valid
    # A bad page id was read as another page; 0 * NaN of it must not reach queries that see nothing.
    out = jnp.where(query_valid[..., None, None], out, 0)
    return (
        jnp.where(bad[..., None, None], jnp.nan, out).astype(out.dtype),
        jnp.where(bad[..., None], jnp.nan, lse),
    )
