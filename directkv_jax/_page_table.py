"""Which pages the rows of a new cache own."""

from __future__ import annotations

import dataclasses

import numpy as np

from directkv_jax._layout import pages_for


@dataclasses.dataclass(frozen=True)
class PageTable:
    """The first page table of a cache.

    Attributes:
      ids: int32 `[B, max_pages]`, over the whole pool; P everywhere if the caller is to fill it.
      pages: P, if every row owns as many pages.
    """

    ids: np.ndarray
    pages: int

    def of_shards(self, shards: int) -> np.ndarray:
        """`ids` as they count within each of `shards` equal parts of the rows and the pool."""
        return np.where(self.ids < self.pages, self.ids % max(1, self.pages // shards), self.ids)


def create(
    batch: int, max_length: int, page_size: int, num_pages: int | None, window: int | None,
    rollback: int,
) -> PageTable:  # fmt: skip
    """Row after row, each with pages of its own; with a window, page p is page p modulo a ring."""
    max_pages = pages_for(max_length, page_size)
    if num_pages is not None:
        return PageTable(np.full((batch, max_pages), num_pages, np.int32), 0)
    ring = max_pages if window is None else min(max_pages, ring_pages(window, rollback, page_size))
    column = np.arange(max_pages, dtype=np.int32) % ring
    return PageTable(np.arange(batch, dtype=np.int32)[:, None] * ring + column, batch * ring)


def ring_pages(window: int, rollback: int, page_size: int) -> int:
    """Pages that a row needs: the window of the next query, also after `rollback` tokens less."""
    return pages_for(max(1, window - 1 + rollback), page_size)


def check_sizes(**sizes) -> None:
    """All are positive ints."""
    for name, value in sizes.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` should be a positive int, but got {value!r}.")


def check_window(window: int | None, rollback: int, num_pages: int | None) -> None:
    """A window is a positive int and goes with a pool of its own; no rollback without one."""
    if isinstance(rollback, bool) or not isinstance(rollback, (int, np.integer)) or rollback < 0:
        raise ValueError(f"`rollback` should be an int of 0 or more, but got {rollback!r}.")
    if window is None:
        if rollback:
            raise ValueError("`rollback` is of a cache with a `window`; others keep all tokens.")
        return
    check_sizes(window=window)
    if num_pages is not None:
        raise ValueError(
            "`num_pages` and `window` exclude each other: with a window every row has its ring."
        )
