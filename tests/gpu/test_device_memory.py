"""Device memory does not depend on the size of the cache or the length of the context."""

from __future__ import annotations

import os

MIB = 1 << 20


def test_big_cache(measure):
    gib = float(os.environ.get("DIRECTKV_BIG_CACHE_GIB", "48"))
    got = measure("measure_big_cache.py", gib, name="big_cache")
    assert got["cache_bytes"] >= 0.99 * gib * 2**30
    assert got["memory_kind"] == "pinned_host"
    assert got["in_place"]
    assert got["full"]
    assert got["hbm_peak_growth_bytes"] < 64 * MIB
    assert got["max_out_error"] < 2e-2
    assert got["max_lse_error"] < 1e-2
    assert got["resident_bytes"] > 0.99 * got["cache_bytes"]
    assert got["resident_bytes_after_delete"] < 2**30


def test_peak_is_flat_while_the_context_grows(measure):
    short, long = (
        measure("measure_hbm_peak.py", tokens, name=f"hbm_peak_{tokens}_tokens")
        for tokens in (4096, 131072)
    )
    assert long["cache_bytes"] > 30 * short["cache_bytes"]
    assert long["peak_bytes"] - short["peak_bytes"] < 4 * MIB
