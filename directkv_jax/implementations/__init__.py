"""The registry of implementations: who can attend, and who is chosen when nobody is named."""

from __future__ import annotations

import functools

from directkv_jax._platform import compiling_ahead
from directkv_jax.implementations._base import Implementation, Request, Storage
from directkv_jax.implementations._native import NativeImplementation
from directkv_jax.implementations._reference import ReferenceImplementation
from directkv_jax.implementations._xla import XlaImplementation

__all__ = ["NAMES", "Implementation", "Request", "Storage", "choose", "get"]

NAMES = ("cuda", "cpu", "xla", "reference")


@functools.cache
def get(name: str) -> Implementation:
    """The implementation of that name.

    Raises:
      ValueError: there is none of that name.
    """
    if name in ("cuda", "cpu"):
        return NativeImplementation(name)
    if name == "xla":
        return XlaImplementation()
    if name == "reference":
        return ReferenceImplementation()
    raise ValueError(
        f"`implementation` should be None or one of {', '.join(NAMES)}, but got {name!r}."
    )


def choose(name: str | None, request: Request) -> Implementation:
    """The named implementation, or the best that reads the cache where it lies.

    With a host cache on an accelerator nothing falls back to an implementation that would copy the
    cache into device memory: that one must be named.

    Raises:
      NotImplementedError: the named one cannot do `request`, or none can.
    """
    if name is not None:
        implementation = get(name)
        if reason := implementation.unsupported_reason(request):
            raise NotImplementedError(f'implementation="{name}" cannot do this: {reason}')
        return implementation
    reasons = []
    for candidate in _candidates(request):
        implementation = get(candidate)
        if not (reason := implementation.unsupported_reason(request)):
            return implementation
        reasons.append(f"{candidate}: {reason}")
    if request.staged_by_xla:
        reasons.append(
            'xla: would copy the host cache to the device at every step; name implementation="xla" '
            'to accept that, or use placement="device"'
        )
    raise NotImplementedError(
        "No implementation reads this cache where it lies. " + "; ".join(reasons) + "."
    )


def _candidates(request: Request) -> tuple[str, ...]:
    native = ("cuda",) if request.platform == "cuda" else ("cpu",)
    if compiling_ahead():
        return native
    return native if request.staged_by_xla else (*native, "xla")
