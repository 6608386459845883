"""The paged KV cache of a group of equal layers, in host or device memory, as a JAX pytree."""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from directkv_jax import _checks, _page_table, _pages, _rows, memory, saving
from directkv_jax._layout import MAX_LENGTH, PageLayout
from directkv_jax._platform import any_tracer, is_concrete
from directkv_jax._saved import Saved
from directkv_jax._sharding import CacheSpecs, axis_size, check_split, named
from directkv_jax._tracking import track, untrack
from directkv_jax.implementations import Storage

_META = (
    "layout", "placement", "mesh", "kv_head_axis", "batch_axis", "tracked", "window", "rollback"
)  # fmt: skip


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("pages", "page_table", "lengths", "overflowed", "written"),
    meta_fields=_META,
)
@dataclasses.dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of `L` equal layers for `B` rows, in pages.

    Nothing here is a request: lengths and page tables are data, so no step recompiles. Methods
    return a new cache; those that write (`fork`) consume the old one when called eagerly. Under
    `jax.jit` donate the cache and only the cache.

    Attributes:
      pages: `[L, P, K, E]` in host or device memory; typed `<host>` when placed on the host. Never
        slice, gather or scatter it with JAX operations: a slice of it is copied into device memory.
      page_table: int32 `[B, max_pages]`, the page ids of each row; one table for all layers. Under
        a split batch the ids count within the shard.
      lengths: int32 `[B]`, tokens in the cache.
      overflowed: bool `[B]`, rows that were given tokens that did not fit, or whose lengths or page
        ids were out of range. Sticky until `reset`.
      layout: geometry of a page.
      placement: "host" or "device".
      mesh: the mesh the cache is split over, or None.
      kv_head_axis: mesh axis of the KV heads.
      batch_axis: mesh axis of the rows and of their pages.
      tracked: the buffer is known, so that a call that was given a copy of it is refused.
      window: tokens that a query may see, itself included, if the cache keeps no others: the page
        table of a row then goes round in a ring of pages. None: all are kept.
      rollback: with a window, how far `truncate` can go back.
      written: with a window, int32 `[B]`, the most tokens that a row has held.
    """

    pages: jax.Array
    page_table: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    layout: PageLayout
    placement: str
    mesh: Mesh | None
    kv_head_axis: str | None
    batch_axis: str | None
    tracked: bool
    window: int | None = None
    rollback: int = 0
    written: jax.Array | None = None

    @classmethod
    def create(
        cls, batch: int, max_length: int, *, num_kv_heads: int, head_dim: int, num_layers: int = 1,
        dtype=jnp.bfloat16, page_size: int = 64, num_pages: int | None = None,
        placement: str = "host", window: int | None = None, rollback: int = 0,
        mesh: Mesh | None = None, kv_head_axis: str | None = None, batch_axis: str | None = None,
    ) -> KVCache:  # fmt: skip
        """Allocates an empty cache. Host memory is page-locked; device memory is not touched.

        Args:
          batch: B, rows.
          max_length: tokens each row can hold; rounded up to whole pages.
          num_kv_heads: K.
          head_dim: H, a multiple of 8.
          num_layers: L, layers of equal shape that share this page table.
          dtype: bfloat16, float16 or float32.
          page_size: tokens per page, a multiple of 16. A fetch is one page of one head,
            `2 * page_size * H * itemsize` bytes; short runs use a link badly.
          num_pages: P; default `B * max_pages`, and row b then owns pages `b * max_pages` and on.
            With any other number the page table starts out of range and is the caller's to fill.
          placement: "host" or "device".
          window: for layers of a sliding window: a query sees so many tokens, itself included, and
            the cache keeps no more of a row than it must. Every attend then names a
            `local_window_size` within it. `fork` is refused.
          rollback: with a window, how many tokens `truncate` may take back.
          mesh: a mesh to split the cache over, with the axes below.
          kv_head_axis: its axis for KV heads; K must be divisible by its size.
          batch_axis: its axis for rows; B and P must be divisible by its size.

        Raises:
          ValueError, TypeError: a size is wrong.
          MemoryError: the memory cannot be had; names asked, available and the limit.
        """
        _page_table.check_sizes(
            batch=batch, max_length=max_length, num_layers=num_layers,
            num_pages=1 if num_pages is None else num_pages,
        )  # fmt: skip
        if max_length > MAX_LENGTH:
            raise ValueError(f"`max_length` should be at most {MAX_LENGTH}, but got {max_length}.")
        _page_table.check_window(window, rollback, num_pages)
        window, rollback = None if window is None else int(window), int(rollback)
        layout = PageLayout(page_size, num_kv_heads, head_dim, dtype)
        table = _page_table.create(batch, max_length, page_size, num_pages, window, rollback)
        num_pages = table.pages if num_pages is None else num_pages
        rows = check_split(mesh, batch_axis, kv_head_axis, batch, num_pages, num_kv_heads)
        specs = CacheSpecs(batch_axis, kv_head_axis)
        shape = (num_layers, num_pages, num_kv_heads, layout.tile_elements)
        pages = memory.allocate(shape, layout.dtype, placement, named(mesh, specs.pages))

        def put(x, spec):
            if mesh is not None:
                return jax.device_put(x, named(mesh, spec))
            # Committed like the pages, or the second jitted step would compile again.
            return jax.device_put(x, memory.beside(pages)) if is_concrete(pages) else x

        return cls(
            pages=pages,
            page_table=put(jnp.asarray(table.of_shards(rows)), specs.page_table),
            lengths=put(jnp.zeros((batch,), jnp.int32), specs.lengths),
            overflowed=put(jnp.zeros((batch,), jnp.bool_), specs.lengths),
            layout=layout,
            placement=placement,
            mesh=mesh,
            kv_head_axis=kv_head_axis,
            batch_axis=batch_axis,
            tracked=track(pages),
            window=window,
            rollback=rollback,
            written=None if window is None else put(jnp.zeros((batch,), jnp.int32), specs.lengths),
        )

    def replace(self, **fields) -> KVCache:
        """A copy with some attributes exchanged; shares the other arrays."""
        return dataclasses.replace(self, **fields)

    @property
    def batch(self) -> int:
        """B: rows."""
        return self.page_table.shape[0]

    @property
    def num_layers(self) -> int:
        """L."""
        return self.pages.shape[0]

    @property
    def num_pages(self) -> int:
        """P: pages of each layer, over the whole mesh."""
        return self.pages.shape[1]

    @property
    def pages_per_shard(self) -> int:
        """Pages that one shard of the batch axis addresses: the range of its page ids."""
        return self.num_pages // axis_size(self.mesh, self.batch_axis)

    @property
    def max_pages(self) -> int:
        """Pages a row can use."""
        return self.page_table.shape[1]

    @property
    def max_length(self) -> int:
        """Tokens a row can hold."""
        return self.max_pages * self.page_size

    @property
    def kept_length(self) -> int:
        """Tokens of a row that are kept, the newest: `max_length`, or those of the ring."""
        if self.window is None:
            return self.max_length
        ring = _page_table.ring_pages(self.window, self.rollback, self.page_size)
        return min(self.max_pages, ring) * self.page_size

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layout.page_size

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.layout.num_kv_heads

    @property
    def head_dim(self) -> int:
        """H."""
        return self.layout.head_dim

    @property
    def dtype(self) -> np.dtype:
        """Dtype of keys and values."""
        return self.layout.dtype

    @property
    def storage(self) -> Storage:
        """What an implementation needs to know of the pages of one shard."""
        heads = self.num_kv_heads // axis_size(self.mesh, self.kv_head_axis)
        layout = dataclasses.replace(self.layout, num_kv_heads=heads)
        return Storage(layout, self.placement == "host", self.tracked)

    @property
    def nbytes(self) -> int:
        """Bytes of `pages`."""
        return self.num_layers * self.num_pages * self.layout.page_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers: 2 * L * K * H * itemsize."""
        return self.num_layers * self.layout.bytes_per_token

    @property
    def host_bytes(self) -> int:
        """Bytes of keys and values in host memory."""
        return self.nbytes if self.placement == "host" else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of keys and values in device memory."""
        return self.nbytes if self.placement == "device" else 0

    def admit(self, seq_lengths, tokens: int):
        """(tokens each row accepts, int32 `[B]`; `overflowed` after that, bool `[B]`)."""
        return _rows.admit(self, seq_lengths, tokens)

    def advance(self, n) -> KVCache:
        """`lengths + n` for rows that have not overflowed; once per step, after all layers.

        Args:
          n: int or int32 `[B]`; the `query_seq_lengths` of the step.

        Raises:
          ValueError: eagerly, if a row would exceed its capacity. Under jit it is flagged instead.
        """
        _checks.check_alive(self)
        return _rows.advance(self, _checks.check_rows_argument("n", n, self.batch))

    def truncate(self, lengths) -> KVCache:
        """Rolls rows back to `lengths`, an int or int32 `[B]`, at most the present lengths.

        Raises:
          ValueError: eagerly, if a length is negative or larger than the present one, if the new
            last page is shared with another row by `fork`, or, with a window, if it is further back
            than `rollback` from the longest the row has been. Under jit such rows keep their length
            and are flagged.
        """
        _checks.check_alive(self)
        return _rows.truncate(self, _checks.check_rows_argument("lengths", lengths, self.batch))

    def take_rows(self, rows) -> KVCache:
        """Rows `rows` (int32 `[B']`, no repeats) of this cache in that order; moves no data.

        For repeats, as beams need, use `fork`. Under jit a repeated row is flagged.
        """
        _checks.check_alive(self)
        return _rows.take_rows(self, rows)

    def fork(self, rows) -> KVCache:
        """Rows `rows` (int32 `[B']`, repeats allowed) as independent rows.

        Full pages are shared; the open page of each row is copied by a native call, so that each
        goes on alone. Every row keeps its capacity as long as the pool has free pages: with the
        default pool, as long as B' <= B.
        """
        return _rows.fork(self, rows)

    def reset(self, rows=None) -> KVCache:
        """Empties rows, a bool mask `[B]` (default: all), and clears their `overflowed`.

        Pages that such a row shares with another by `fork` are exchanged for free ones.
        """
        _checks.check_alive(self)
        mask = jnp.ones((self.batch,), bool) if rows is None else jnp.asarray(rows)
        if mask.dtype != jnp.bool_ or mask.shape != (self.batch,):
            raise TypeError(
                f"`rows` should be a bool mask of shape (B={self.batch},), but got {mask.dtype} "
                f"{mask.shape}."
            )
        return _rows.reset(self, mask)

    def delete(self) -> None:
        """Frees the memory at once. Using the cache afterwards is an error."""
        untrack(self.pages)
        for array in jax.tree.leaves(self):
            array.delete()

    def save(self, path: str | os.PathLike) -> None:
        """Writes what the rows hold into a safetensors file; `KVCache.load` reads it.

        Raises:
          OSError: the file cannot be written.
          ValueError: the cache was donated away, is traced, or has no rows.
          NotImplementedError: the batch is split over a mesh.
        """
        saving.save(path, {"cache": self}, {})

    @classmethod
    def load(
        cls, path: str | os.PathLike, *, max_length: int | None = None, placement: str | None = None
    ) -> KVCache:
        """A saved cache, in memory of its own.

        Args:
          path: of the file.
          max_length: tokens each row can hold; None: as many as before.
          placement: "host" or "device"; None: where it was.

        Raises:
          FileNotFoundError, ValueError: the file is absent, damaged or of another kind, or rows are
            longer than `max_length`.
          MemoryError: the memory cannot be had.
        """
        return Saved(path).load("cache", max_length=max_length, placement=placement)

    def adopt(self) -> KVCache:
        """Accepts the present buffer after a deliberate copy, as by `jax.device_put`."""
        _checks.check_cache(self)
        return self.replace(tracked=track(self.pages))

    def gather(self, layer: int, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of tokens `[start, stop)` as NumPy `[n, K, H]`, for debugging.

        Beyond the length of the row they are what its pages hold, such as tokens that were appended
        and not yet counted by `advance`.

        Raises:
          ValueError: traced, or a range that the row has no room for, or keeps no more.
        """
        _checks.check_cache(self)
        return _pages.gather(self, layer, row, start, stop)

    def __repr__(self) -> str:
        if not hasattr(self.pages, "shape"):
            return f"KVCache({self.pages!r})"  # a pytree of something else: a spec, a path
        known = is_concrete(self.lengths) and not any_tracer(self.lengths)
        known = known and not self.lengths.is_deleted()
        lengths = np.asarray(self.lengths).tolist() if known else "?"
        return (
            f"KVCache(B={self.batch}, L={self.num_layers}, K={self.num_kv_heads}, "
            f"H={self.head_dim}, {self.dtype.name}, max_length={self.max_length}, "
            f"page_size={self.page_size}, {self.placement}, {self.nbytes / 2**20:.1f} MiB, "
            f"{'' if self.window is None else f'window={self.window}, '}"
            f"lengths={lengths})"
        )
