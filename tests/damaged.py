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
