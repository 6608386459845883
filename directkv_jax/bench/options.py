"""What the options of the benchmarks accept."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """An int of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1, but got {value}")
    return value


def tokens(text: str) -> int:
    """A number of tokens; "8k" is 8192."""
    return positive(text[:-1]) * 1024 if text.lower().endswith("k") else positive(text)


def heads(text: str) -> tuple[int, int]:
    """(N, K) of "N/K", query heads / KV heads; "8" is "8/8"."""
    query, _, kv = text.partition("/")
    pair = int(query), int(kv or query)
    if min(pair) < 1 or pair[0] % pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r} should be N/K with N a multiple of K")
    return pair
