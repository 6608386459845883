"""Plain JAX on any platform: low-precision matmuls with float32 accumulation, left to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from directkv_jax.implementations import _paged
from directkv_jax.implementations._base import Options, Request, Rows
from directkv_jax.implementations._reference import poison


class XlaImplementation:
    """Gathers the pages of a layer and attends to them with einsums.

    On an accelerator a host cache is staged: `attend` copies one layer of it to the device, and
    `append` copies the whole cache there and back. That is the baseline, not a way to run.
    """

    name = "xla"
    append = staticmethod(_paged.append)
    read_pages = staticmethod(_paged.read_pages)
    write_pages = staticmethod(_paged.write_pages)

    def unsupported_reason(self, request: Request) -> None:
        """None: it serves every request, at the price the class names."""

    def attend(self, query, key, value, pages, rows: Rows, options: Options):
        """Grouped-query attention over the gathered tokens; no key or value is repeated."""
        layout = options.storage.layout
        batch, tokens, heads, dim = query.shape
        cached_k, cached_v = _paged.read_rows(pages, rows, layout)
        keys = jnp.concatenate([cached_k, key], 1)
        values = jnp.concatenate([cached_v, value], 1)
        seen = _paged.visible(rows, tokens, key.shape[1], cached_k.shape[1], options.window_left)
        ever = seen.any(1)[:, :, None, None]
        values = jnp.where(ever, values, 0)  # 0 * NaN of an unwritten slot would spread
        grouped = query.reshape(batch, tokens, layout.num_kv_heads, -1, dim)
        logits = jnp.einsum("btkgh,bskh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
        logits *= options.scale
        if options.soft_cap > 0:
            logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
        out = jnp.einsum(
            "bkgts,bskh->btkgh",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        out = out.reshape(batch, tokens, heads, dim).astype(query.dtype)
        lse = jnp.moveaxis(lse, 3, 1).reshape(batch, tokens, heads)
        return poison(out, lse, rows, pages, options)
