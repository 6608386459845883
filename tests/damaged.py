"""Damages safetensors files as disks and other programs might."""

from __future__ import annotations

import json
from collections.abc import Callable


def rewritten(whole: bytes, change: Callable[[dict], object]) -> bytes:
    """The file with what `change` makes of its header."""
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[end:]


def described(cache: str, key: str, value: object) -> Callable[[dict], None]:
    """For `rewritten`: another value in the description of a saved cache."""

    def change(header: dict) -> None:
        known = json.loads(header["__metadata__"][cache])
        header["__metadata__"][cache] = json.dumps({**known, key: value})

    return change
