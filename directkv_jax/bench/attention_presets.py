"""Which cases `directkv bench attention` measures: sweeps and presets. Touches no JAX."""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

from directkv_jax.bench.attention_cases import (
    BASELINES,
    IMPLEMENTATIONS,
    ONLY_IN,
    PLACEMENTS,
    Case,
)

# What runs by default. On a GPU `xla` and `reference` run only when named: they stage a host cache.
_DEFAULTS = {
    ("gpu", "host"): ("cuda", "naive", "staged"),
    ("gpu", "device"): ("cuda", "cudnn", "jax-xla", "pallas"),
    ("cpu", "host"): ("cpu", "xla"),
    ("cpu", "device"): ("cpu", "xla"),
}

K = 1024
# Each line of the table of targets, as options; a preset is one or more sets of them.
PRESETS: dict[str, list[dict[str, Any]]] = {
    "reach": [
        {"placement": ["host"], "batch": [1, 4, 16], "length": [8 * K, 32 * K, 128 * K]},
        {"placement": ["host"], "batch": [16], "length": [2 * K]},
    ],
    "ctas": [
        {
            "placement": ["host"], "implementation": ["cuda"], "batch": [1, 16],
            "length": [32 * K], "num_ctas": [1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 132],
        },
    ],
    "shapes": [
        {"head_dim": [64, 80, 96, 128, 256]},
        {"heads": [(8, 8), (24, 8), (32, 8), (28, 4), (64, 8), (128, 8)]},
        {"query_tokens": [2, 3, 4, 8]},
        {"heads": [(128, 8)], "query_tokens": [8], "head_dim": [80, 128, 256]},
        {"dtype": ["float16"]},
    ],
    "ragged": [
        {
            "placement": ["host"], "implementation": ["cuda"], "batch": [16], "ragged": True,
            "seed": [0, 1, 2],
        },
    ],
    "device": [
        {"placement": ["device"], "batch": [16], "length": [32 * K]},
        {"placement": ["device"], "batch": [1], "length": [128 * K]},
        {"placement": ["device"], "batch": [64], "length": [8 * K]},
    ],
    "chunk": [
        {
            "placement": ["host"], "implementation": ["cuda", "staged"], "batch": [1],
            "length": [128 * K], "query_tokens": [2 * K],
        },
        {
            "placement": ["device"], "implementation": ["cuda", "cudnn"], "batch": [1],
            "length": [128 * K], "query_tokens": [2 * K],
        },
    ],
    "graph": [
        {
            "implementation": ["cuda"], "batch": [1], "length": [16], "layers": 32, "appends": True,
            "placement": ["device", "host"],
        },
    ],
}  # fmt: skip
for _group in PRESETS["shapes"]:
    _group.update(placement=["host"], implementation=["cuda"], batch=[4], length=[32 * K])

_SWEEPS: dict[str, list[Any]] = {
    "batch": [1, 4, 16], "length": [8 * K, 32 * K], "heads": [(32, 8)], "head_dim": [128],
    "dtype": ["bfloat16"], "query_tokens": [1], "num_ctas": [None], "seed": [0],
}  # fmt: skip
_QUICK: dict[str, list[Any]] = {"batch": [1, 2], "length": [1 * K, 4 * K], "heads": [(8, 2)]}


def log_uniform(batch: int, seed: int, low: int = 100, high: int = 128 * K) -> tuple[int, ...]:
    """B lengths whose logarithms are uniform: most rows short, a few long."""
    generator = random.Random(seed)
    span = math.log(low), math.log(high)
    return tuple(round(math.exp(generator.uniform(*span))) for _ in range(batch))


def expand(arguments: argparse.Namespace, has_gpu: bool) -> list[Case]:
    """The cases that the options ask for, in the order in which they need the fewest caches.

    Options given beside a preset replace the preset's own.
    """
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in (*_SWEEPS, "placement", "implementation", "ragged", "layers", "appends")
        and value
    }
    groups = PRESETS[arguments.preset] if arguments.preset else [_QUICK if arguments.quick else {}]
    cases: dict[Case, None] = {}
    for group in groups:
        for case in _sweep({**group, **given}, has_gpu, arguments.shuffle_pages):
            cases[case] = None
    # Ours first: all of them share one pool, which is freed before dense arrays are made.
    order = {name: place for place, name in enumerate(IMPLEMENTATIONS)}
    return sorted(
        cases,
        key=lambda c: (
            PLACEMENTS.index(c.placement), c.implementation in BASELINES,
            c.layers, c.kv_heads, c.head_dim, c.dtype, c.batch * c.max_length, c.lengths,
            c.query_heads, c.query_tokens, order[c.implementation], c.num_ctas or 0,
        ),
    )  # fmt: skip


def _sweep(options: dict[str, Any], has_gpu: bool, shuffled: bool) -> Iterator[Case]:
    lists = {name: options.get(name) or default for name, default in _SWEEPS.items()}
    if options.get("ragged"):
        lists["length"] = [None]
    platform = "gpu" if has_gpu else "cpu"
    placements = options.get("placement") or (PLACEMENTS if has_gpu else ("host",))
    for placement in placements:
        names = options.get("implementation") or _DEFAULTS[platform, placement]
        if len(placements) > 1:  # named for the placement where it makes sense
            names = [name for name in names if ONLY_IN.get(name, placement) == placement]
        for name, *values in itertools.product(names, *lists.values()):
            picked: dict[str, Any] = dict(zip(lists, values, strict=True))
            batch, length = picked.pop("batch"), picked.pop("length")
            picked["query_heads"], picked["kv_heads"] = picked.pop("heads")
            seed = picked.pop("seed")
            if name != "cuda":
                picked["num_ctas"] = None  # nobody else takes it: one case, not several
            yield Case(
                placement=placement,
                implementation=name,
                lengths=log_uniform(batch, seed) if length is None else (length,) * batch,
                layers=options.get("layers") or 1,
                appends=bool(options.get("appends")),
                shuffled=shuffled,
                **picked,
            )
