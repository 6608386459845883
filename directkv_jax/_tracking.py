"""Knows the buffers of live caches, so that a call can tell the cache from a copy XLA made of it.

An undonated cache is copied, host to host, at every step and without a word. The append handler
asks the native registry whether the pointer it was given is one of ours.
"""

from __future__ import annotations

from directkv_jax import _native, memory
from directkv_jax._platform import is_concrete, platform_of


def track(pages) -> bool:
    """Registers the buffers of `pages`; False where it has none, or there is no native module."""
    module = _registry(pages)
    if module is None:
        return False
    for address, nbytes in memory.base_pointers(pages):
        module.register_buffer(address, nbytes)
    return True


def untrack(pages) -> None:
    """Forgets the buffers of `pages`."""
    if is_concrete(pages) and pages.is_deleted():
        return
    module = _registry(pages)
    if module is not None:
        for address, _ in memory.base_pointers(pages):
            module.unregister_buffer(address)


def _registry(pages):
    if not is_concrete(pages):
        return None
    platform = platform_of(pages)
    module = _native.load(platform) if platform in ("cpu", "cuda") else "no kernels"
    return None if isinstance(module, str) else module
