"""How one page of the cache is laid out: the Python twin of `csrc/page_layout.h`."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

DTYPES = ("bfloat16", "float16", "float32")
MAX_PAGE_SIZE = 4096
MAX_LENGTH = 1 << 30  # tokens of a row: lengths are int32, and so are sums of two of them


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Geometry of a page: `page_size` tokens of every KV head of one layer.

    `pages` has shape `[L, P, K, E]`. One tile, the innermost `E` elements, holds keys and values of
    one KV head side by side, so that it is fetched as a single contiguous run. The element order
    inside a tile is private to this class and to `csrc/page_layout.h`.

    Attributes:
      page_size: tokens per page, a multiple of 16.
      num_kv_heads: K.
      head_dim: H, a multiple of 8.
      dtype: NumPy dtype of the cache: bfloat16, float16 or float32.
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.dtype.name not in DTYPES:
            raise TypeError(f"`dtype` should be one of {', '.join(DTYPES)}, but got {self.dtype}.")
        check_page_size(self.page_size)
        _check_multiple("head_dim", self.head_dim, 8, 512)
        if not _is_int(self.num_kv_heads) or self.num_kv_heads < 1:
            raise ValueError(
                f"`num_kv_heads` should be a positive int, but got {self.num_kv_heads!r}."
            )
        for name in ("page_size", "num_kv_heads", "head_dim"):  # of NumPy before
            object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def tile_elements(self) -> int:
        """E: elements of one KV head in one page, keys and values."""
        return 2 * self.page_size * self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer: 2 * K * H * itemsize."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.page_size * self.bytes_per_token

    def unpack(self, tiles):
        """Views tiles `[..., E]` as `[..., 2, page_size, H]`: keys at index 0, values at 1."""
        return tiles.reshape(*tiles.shape[:-1], 2, self.page_size, self.head_dim)

    def pack(self, rows):
        """The inverse of `unpack`."""
        return rows.reshape(*rows.shape[:-3], self.tile_elements)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return math.ceil(tokens / page_size)


def check_page_size(page_size) -> None:
    """Raises a ValueError unless pages can be that many tokens long."""
    _check_multiple("page_size", page_size, 16, MAX_PAGE_SIZE)


def _is_int(x) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _check_multiple(name: str, value, step: int, largest: int) -> None:
    if not _is_int(value) or value < step or value % step or value > largest:
        raise ValueError(
            f"`{name}` should be a multiple of {step} from {step} to {largest}, but got {value!r}."
        )
