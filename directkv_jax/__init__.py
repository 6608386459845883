"""Zero-copy KV cache offloading for JAX: decode attention that reads the cache in CPU memory.

Start with `KVCache.create` and `decode_attention`; `directkv_jax.nnx` and `directkv_jax.linen` hold
drop-ins for Flax's attention modules, `directkv_jax.models` whole models.
"""

from directkv_jax import memory
from directkv_jax._layout import PageLayout
from directkv_jax._version import __version__
from directkv_jax.attention import (
    append,
    attend,
    decode_attention,
    is_supported,
    unsupported_reason,
)
from directkv_jax.cache import KVCache
from directkv_jax.implementations import NAMES as implementations
from directkv_jax.qkv import QKVProjection, qkv_attention
from directkv_jax.rope import RoPE

__all__ = [
    "KVCache",
    "PageLayout",
    "QKVProjection",
    "RoPE",
    "__version__",
    "append",
    "attend",
    "decode_attention",
    "implementations",
    "is_supported",
    "memory",
    "qkv_attention",
    "unsupported_reason",
]
