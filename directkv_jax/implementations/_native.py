"""Our kernels behind XLA FFI calls: the same targets and operands on CPU and CUDA.

The rules that shape these calls: a call that aliases a host operand has exactly one result, so
writing (`append`) and reading (`attend`) are two calls; the result of `append` has the type of its
operand, `<host>` included; the cache is passed whole, never a slice of it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax import _native
from directkv_jax._platform import compiling_ahead
from directkv_jax.implementations._base import Options, Request, Rows, Storage

CUDA_HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16


class NativeImplementation:
    """The zero-copy kernels of one platform: `cuda`, or `cpu`."""

    def __init__(self, platform: str):
        self.name = self.platform = platform

    def unsupported_reason(self, request: Request) -> str | None:
        """Why this platform's kernels cannot serve `request`."""
        group = request.num_query_heads // max(1, request.num_kv_heads)
        if self.platform == "cuda" and request.head_dim not in CUDA_HEAD_DIMS:
            return f"head_dim is {request.head_dim}; the kernels exist for {CUDA_HEAD_DIMS}"
        if group > MAX_GROUP:
            return f"{group} query heads share a KV head; at most {MAX_GROUP} can"
        if compiling_ahead():
            return None
        if request.platform != self.platform:
            where = "no CUDA device" if self.platform == "cuda" else "not the CPU backend"
            return f"{where}: JAX runs this on {request.platform!r}"
        module = _native.load(self.platform)
        return module if isinstance(module, str) else None

    def attend(self, query, key, value, pages, rows: Rows, options: Options):
        """One pass over the pages where they lie."""
        call = _attend_call(options, self.platform)
        return call(query, key, value, pages, *rows)

    def append(self, pages, key, value, rows: Rows, storage: Storage, after):
        """In place; refuses a copy of a tracked cache ("the cache was not donated")."""
        return _append_call(storage)(pages, key, value, *rows, after)

    def read_pages(self, pages, page_ids, storage: Storage):
        """A gather of whole pages into device memory."""
        shape = (page_ids.shape[0], pages.shape[0], *pages.shape[2:])
        result = jax.ShapeDtypeStruct(shape, pages.dtype)
        call = jax.ffi.ffi_call(_native.READ_PAGES, result)
        return call(pages, page_ids, **attributes(storage))

    def write_pages(self, pages, data, page_ids, storage: Storage):
        """A scatter of whole pages from device memory, in place."""
        call = jax.ffi.ffi_call(_native.WRITE_PAGES, jax.typeof(pages), input_output_aliases={0: 0})
        return call(pages, data, page_ids, **attributes(storage))


def attributes(storage: Storage) -> dict[str, np.int32]:
    """The attributes that every call has."""
    return {
        "page_size": np.int32(storage.layout.page_size),
        "host": np.int32(storage.host),
        "tracked": np.int32(storage.tracked),
    }


def workspace_bytes(platform: str, query, page_table, storage: Storage) -> int:
    """Bytes of the workspace that an attend returns besides its results."""
    batch, tokens, heads, dim = query.shape
    layout = storage.layout
    sizes = (batch, tokens, heads, layout.num_kv_heads, dim)
    max_pages = page_table.shape[1]
    for module in map(_native.load, ("cuda", "cpu")):
        if isinstance(module, str):
            continue  # plain arithmetic on shapes, the same in both modules
        if platform == "cpu":
            return max(1, module.cpu_workspace_bytes(*sizes, max_pages))
        pages = (layout.page_size, max_pages, storage.host)
        return max(1, module.cuda_workspace_bytes(layout.dtype.itemsize, *sizes, *pages))
    raise NotImplementedError("No native module is installed.")


@functools.lru_cache(maxsize=256)
def _attend_call(options: Options, platform: str):
    """attend as a function of arrays only, with its rule for vmap."""

    @jax.custom_batching.custom_vmap
    def attend(query, key, value, pages, page_table, lengths, seq_lengths, layer):
        results = (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
            jax.ShapeDtypeStruct(
                (workspace_bytes(platform, query, page_table, options.storage),), jnp.uint8
            ),
        )
        out, lse, _ = jax.ffi.ffi_call(_native.ATTEND, results)(
            query, key, value, pages, page_table, lengths, seq_lengths, layer,
            **attributes(options.storage),
            scale=np.float32(options.scale),
            soft_cap=np.float32(options.soft_cap),
            window_left=np.int32(options.window_left),
            num_ctas=np.int32(options.num_ctas),
        )  # fmt: skip
        return out, lse

    @attend.def_vmap
    def fold_into_batch(size, batched, query, key, value, pages, *rest):
        *rows, layer = rest
        if batched[3] or batched[7]:
            raise NotImplementedError(
                "jax.vmap over the cache (its `pages`, or `layer`) is not supported: it would copy "
                "the cache once for each mapped element. Map over the query, or put the mapped "
                "axis into the batch of one cache."
            )
        small = (query, key, value, *rows)
        mapped = (*batched[:3], *batched[4:7])
        folded = [_fold(x, is_mapped, size) for x, is_mapped in zip(small, mapped, strict=True)]
        out, lse = attend(*folded[:3], pages, *folded[3:], layer)
        return (_unfold(out, size), _unfold(lse, size)), (True, True)

    return attend


def _fold(x, mapped: bool, size: int):
    x = x if mapped else jnp.broadcast_to(x[None], (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _unfold(x, size: int):
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


@functools.lru_cache(maxsize=256)
def _append_call(storage: Storage):
    """append as a function of arrays only; vmap of it is refused by name."""

    @jax.custom_batching.custom_vmap
    def append(pages, key, value, page_table, lengths, seq_lengths, layer, after):
        call = jax.ffi.ffi_call(_native.APPEND, jax.typeof(pages), input_output_aliases={0: 0})
        return call(
            pages, key, value, page_table, lengths, seq_lengths, layer, after,
            **attributes(storage),
        )  # fmt: skip

    @append.def_vmap
    def refuse(size, batched, *operands):
        del size, batched, operands
        raise NotImplementedError(
            "jax.vmap of `append` is not supported: the mapped elements would write the same slots "
            "of one cache, or the cache would be copied once for each. Put the mapped axis into "
            "the batch of one cache."
        )

    return append
