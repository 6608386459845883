"""`directkv bench layer`: a layer's attention from its input, as a decode step has it.

    directkv bench layer --preset reach     rows and contexts, in device and in host memory
    directkv bench layer --placement host --batch 4 --length 8k --implementation fused unfused

QKV projection, RoPE, attention and append, of several layers one after the other in one program,
each with weights and a cache of its own; the time is that of one. The bound comes first: on the
device the bytes of weights, keys and values over what HBM delivers; with a host cache the longer of
the link's time and the weights'.

`fused` is `qkv_attention`, `unfused` its projection and `decode_attention` after each other, and
`jax` a matrix product, `jax.lax.dynamic_update_slice` and `jax.nn.dot_product_attention`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import Any

from directkv_jax.bench import options, record, table

IMPLEMENTATIONS = ("fused", "unfused", "jax")
PLACEMENTS = ("device", "host")
COLUMNS = {
    "placement": "placement", "implementation": "implementation", "B": "batch", "S": "length",
    "D": "width", "us": "us", "bound us": "bound_us", "of bound": "share_of_bound",
    "rel. difference": "difference",
}  # fmt: skip
K = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; those that take several values are swept."""
    add = parser.add_argument
    add("--placement", nargs="+", choices=PLACEMENTS, help="of the cache (default: both)")
    add("--implementation", nargs="+", choices=IMPLEMENTATIONS, help="(default: all)")
    add("--batch", nargs="+", type=options.positive, metavar="B", help="rows (default: 1)")
    add("--length", nargs="+", type=options.tokens, metavar="S", help="cached (default: 1k)")
    add("--heads", type=options.heads, default=(32, 8), metavar="N/K", help="(default: 32/8)")
    add("--head-dim", type=options.positive, default=128, metavar="H", help="N H is D, too")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--layers", type=options.positive, default=16, metavar="L", help="timed together")
    add("--preset", choices=("reach",), help="B = 1, 4, 8 and S = 1k, 4k, 16k")
    add("--repeats", type=options.positive, default=5, help="the median counts")
    add("--json", action="store_true", help="end with one JSON object on stdout")
    add("--output", metavar="DIR", help="of the record (default: benchmarks/results of a checkout)")
    add("--name", help="of the record, after its date")


def run(arguments: argparse.Namespace) -> int:
    """Measures all cases and writes the record.

    Returns:
      the exit status: 1 if no case could be measured.
    """
    from directkv_jax.bench.layer_programs import Bench

    reach = arguments.preset == "reach"
    lists = (
        arguments.placement or PLACEMENTS,
        arguments.length or ([1 * K, 4 * K, 16 * K] if reach else [1 * K]),
        arguments.batch or ([1, 4, 8] if reach else [1]),
        arguments.implementation or IMPLEMENTATIONS,
    )
    rows: list[dict[str, Any]] = []
    bench = Bench(arguments)
    result = {
        **record.stamp(), "benchmark": "layer", "command": record.command("directkv"),
        "peaks": bench.peaks, "rows": rows,
    }  # fmt: skip
    name = arguments.name or f"{record.gpu_slug()}-layer"
    path = None
    for placement, length, batch, implementation in itertools.product(*lists):
        if (placement, implementation) == ("host", "jax"):
            continue  # it would stage the cache
        row = bench.row(placement, length, batch, implementation)
        rows.append(row)
        path = record.write(result, name, arguments.output)
        figures = row["error"] or f"{row['us']:.1f} us"
        print(f"{placement} {implementation} B={batch} S={length}: {figures}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(table.lines(COLUMNS, rows)))
    print(f"{len(rows)} rows in {path}", file=sys.stderr)
    return 1 if all(row["error"] for row in rows) else 0
