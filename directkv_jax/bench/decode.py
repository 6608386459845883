"""`directkv bench decode`: whole decode steps of a model with random weights and a random cache.

A step reads every weight and every cached key and value once, and that is what it costs: the bound
of a row is KV bytes over the peak of the memory they lie in, plus weight bytes over that of HBM.

Placements:
  host: this package, cache in host memory, read over the link in place.
  device: this package, cache in device memory.
  staged: plain JAX, cache in host memory, each layer copied to the device while the one before
    computes: the strongest baseline we know how to write.
  hbm-jax: plain JAX, contiguous cache in device memory, cuDNN's attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from directkv_jax.bench import decode_cases, options, record, table
from directkv_jax.bench.decode_cases import Case
from directkv_jax.bench.decode_child import environment, run_case, usable_host_bytes

COLUMNS = {
    "shape": "shape", "placement": "placement", "L": "layers", "B": "batch", "S": "length",
    "ms/step": "ms_per_step", "tokens/s": "tokens_per_s", "GB/s of link": "link_gb_per_s",
    "of zero-copy": "share_of_zero_copy_peak", "x bound": "ratio_to_bound",
    "HBM peak GiB": "hbm_gib", "host GiB": "host_gib",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {"shape": ["llama-8b"], "batch": [1], "length": [32768]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `directkv bench decode`."""
    add = parser.add_argument
    add("--preset", choices=tuple(decode_cases.PRESETS), help="a set of rows; options override it")
    add("--shape", nargs="+", choices=tuple(decode_cases.SHAPES), help="default: llama-8b")
    add("--batch", nargs="+", type=options.positive, metavar="B", help="rows (default: 1)")
    add("--length", nargs="+", type=options.tokens, metavar="S", help="cached tokens; 32k is 32768")
    add(
        "--placement", nargs="+", choices=decode_cases.PLACEMENTS, metavar="WHERE",
        help=f"of {', '.join(decode_cases.PLACEMENTS)} (default: all)",
    )  # fmt: skip
    add("--steps", type=options.positive, help="timed steps of each row (default: 10)")
    add("--layers", type=options.positive, metavar="L", help="instead of the shape's own number")
    add(
        "--attention", choices=decode_cases.ATTENTIONS, default="auto",
        help="of the plain-JAX placements; auto is cudnn where it compiles, else xla",
    )  # fmt: skip
    add("--hbm-limit", type=float, metavar="GB", help="device memory a row may use, in 10^9 bytes")
    add("--json", action="store_true", help="one JSON object on stdout instead of a table")
    add("--output", metavar="DIR", help="of the record (default: benchmarks/results of a checkout)")
    add("--name", help="of the record, after its date")
    add("--dry-run", action="store_true", help="say what would run, and the bytes it needs")
    add("--worker", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Measures row by row. The exit status is 1 if no row could be measured."""
    if arguments.worker:
        from directkv_jax.bench.decode_worker import main

        return main()
    cases = cases_of(arguments)
    if arguments.dry_run:
        for case in cases:
            print(_plan(case))
        return 0
    device_bytes = _device_bytes()
    for case in cases:
        environment(case, device_bytes)  # refuses a wrong limit before the first row
    result: dict[str, Any] = {
        **record.stamp(),
        "benchmark": "decode",
        "command": record.command("directkv"),
        "peaks": {},
        "rows": [],
    }
    try:
        for case in cases:
            row = run_case(case, device_bytes)
            result["peaks"].update(row.pop("peaks", {}))
            result["rows"].append(row)
            record.write(result, _name(arguments), arguments.output)
            told = row["error"] or f"{row['ms_per_step']:.2f} ms per step"
            print(f"[{len(result['rows'])}/{len(cases)}] {case.label}: {told}", file=sys.stderr)
    except KeyboardInterrupt:
        result["interrupted"] = True
        raise
    finally:
        path = record.write(result, _name(arguments), arguments.output)
        if arguments.json:
            print(json.dumps(result), flush=True)
        else:
            print("\n".join(table.lines(COLUMNS, [_readable(row) for row in result["rows"]])))
        print(f"{len(result['rows'])} rows in {path}", file=sys.stderr)
    return 1 if all(row["error"] for row in result["rows"]) else 0


def _name(arguments: argparse.Namespace) -> str:
    suffix = f"-{arguments.preset}" if arguments.preset else ""
    machine = record.gpu_slug() if record.visible_gpus() else "nogpu"
    return arguments.name or f"{machine}-decode{suffix}"


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """The rows that preset and options ask for."""
    preset = decode_cases.PRESETS.get(arguments.preset, {})
    chosen = {**_DEFAULTS, **preset}
    for option in ("shape", "batch", "length", "steps", "hbm_limit"):
        if (value := getattr(arguments, option)) is not None:
            chosen[option] = value
    fields: dict[str, Any] = {"layers": arguments.layers, "attention": arguments.attention}
    fields["hbm_limit_gb"] = chosen.get("hbm_limit")
    if "steps" in chosen:
        fields["steps"] = chosen["steps"]
    placements = arguments.placement or decode_cases.PLACEMENTS
    cases = decode_cases.expand(
        chosen["shape"], chosen["batch"], chosen["length"], placements, **fields
    )
    if arguments.preset == "context" and arguments.layers is None:
        reduced = decode_cases.reduce_to(cases, usable_host_bytes())
        if reduced != cases:
            print(
                f"directkv: the host memory here holds {reduced[0].layers} of the layers: "
                "all rows run with that many.",
                file=sys.stderr,
            )
        return reduced
    return cases


def _device_bytes() -> int | None:
    """Memory of the first GPU."""
    gpus = record.visible_gpus()
    return int(gpus[0]["memory.total"].split()[0]) << 20 if gpus else None  # "143771 MiB"


def _plan(case: Case) -> str:
    where = "host" if case.placement in decode_cases.IN_HOST_MEMORY else "device"
    limit = f", HBM limited to {case.hbm_limit_gb:g} GB" if case.hbm_limit_gb else ""
    return (
        f"{case.label}: {case.parameter_bytes / 2**30:.2f} GiB of weights, "
        f"{case.cache_bytes / 2**30:.2f} GiB of cache in {where} memory{limit}"
    )


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """A row with sizes in GiB; what is null stays so."""
    sizes = {"hbm_gib": "hbm_peak_bytes", "host_gib": "host_bytes"}
    return row | {
        short: None if row[key] is None else row[key] / 2**30 for short, key in sizes.items()
    }
