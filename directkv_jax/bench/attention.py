"""`directkv bench attention`: how fast one layer's cache is consumed, and by whom.

    directkv bench attention --preset reach        keys and values in host memory, of growing size
    directkv bench attention --batch 16 --length 32k --implementation cuda --num-ctas 1 2 4 8 16
    directkv bench attention --quick               a CPU machine, within a minute

The bound comes first: a decode step reads every cached key and value once, so its time is at least
their bytes over what the link (or HBM) delivers. The figure of merit is the share of a plain read
of as many bytes, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from directkv_jax.bench import (
    attention_cases,
    attention_presets,
    counters,
    options,
    record,
    table,
    workers,
)
from directkv_jax.bench.attention_cases import Case

COMMAND = ("bench", "attention")
COLUMNS = {
    "implementation": "implementation", "B": "batch", "S": "length", "heads": "heads",
    "dtype": "dtype", "T": "query_tokens", "CTAs": "num_ctas", "us": "us", "MB of KV": "kv_mb",
    "GB/s": "gb_per_s", "TFLOP/s": "tflop_per_s", "of zero-copy": "share_of_zero_copy_peak",
    "of copy engine": "share_of_copy_engine", "of HBM": "share_of_hbm_peak",
    "link MB": "link_mb", "HBM temp MB": "temp_mb", "rel. error": "relative_error",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; those that take several values are swept."""
    add = parser.add_argument
    add(
        "--placement",
        nargs="+",
        choices=attention_cases.PLACEMENTS,
        help="where keys and values lie (default: host, and device where there is a GPU)",
    )
    add(
        "--implementation",
        nargs="+",
        choices=attention_cases.IMPLEMENTATIONS,
        help="who attends (default: all that make sense there)",
    )
    add("--batch", nargs="+", type=options.positive, metavar="B", help="rows (default: 1 4 16)")
    add(
        "--length",
        nargs="+",
        type=options.tokens,
        metavar="S",
        help="cached tokens of a row; 32k is 32768 (default: 8k 32k)",
    )
    add(
        "--ragged",
        action="store_true",
        help="lengths log-uniform from 100 to 128k instead of --length",
    )
    add("--seed", nargs="+", type=int, help="of the ragged lengths (default: 0)")
    add(
        "--heads",
        nargs="+",
        type=options.heads,
        metavar="N/K",
        help="query heads / KV heads (default: 32/8)",
    )
    add("--head-dim", nargs="+", type=options.positive, metavar="H", help="(default: 128)")
    add("--dtype", nargs="+", choices=tuple(attention_cases.ITEMSIZE), help="(default: bfloat16)")
    add(
        "--query-tokens",
        nargs="+",
        type=options.positive,
        metavar="T",
        help="new tokens a row (default: 1)",
    )
    add(
        "--num-ctas",
        nargs="+",
        type=options.positive,
        metavar="CTAS",
        help="thread blocks of the CUDA kernel (default: it chooses)",
    )
    add(
        "--layers",
        type=options.positive,
        metavar="L",
        help="attend to L layers, one after the other, in one program (default: 1)",
    )
    add("--appends", action="store_true", help="append the new tokens too, as a decode step does")
    add(
        "--shuffle-pages",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="pages in random order, as in a used pool (default: yes)",
    )
    add(
        "--preset",
        choices=tuple(attention_presets.PRESETS),
        help="the cases of one line of the table of targets; other options narrow it down",
    )
    add("--quick", action="store_true", help="small sizes")
    add(
        "--repeats",
        type=options.positive,
        default=5,
        help="the median counts (default: %(default)s)",
    )
    add("--ncu", action="store_true", help="count the bytes on the link with Nsight Compute")
    add("--dry-run", action="store_true", help="list the cases and stop")
    add("--json", action="store_true", help="end with one JSON object on stdout")
    add("--output", metavar="DIR", help="of the record (default: benchmarks/results of a checkout)")
    add("--name", help="of the record, after its date")
    add("--worker", action="store_true", help=argparse.SUPPRESS)  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Measures all cases, each placement in a process of its own, and writes the record.

    Returns:
      the exit status: 1 if no case could be measured.
    """
    if arguments.worker:
        from directkv_jax.bench import attention_worker

        return attention_worker.main()
    gpus = record.visible_gpus()
    cases = attention_presets.expand(arguments, has_gpu=bool(gpus))
    if arguments.dry_run:
        print("\n".join(f"{case.label}: {case.kv_bytes / 1e6:.1f} MB" for case in cases))
        return 0
    result = Result(arguments, record.gpu_slug() if gpus else "nogpu")
    try:
        for placement in attention_cases.PLACEMENTS:
            there = [case for case in cases if case.placement == placement]
            _measure(there, result, len(cases), arguments)
        if arguments.ncu:
            result.add_counters(cases, counters.link_bytes(cases))
    except KeyboardInterrupt:
        result.fields["interrupted"] = True
        raise
    finally:
        path = result.write()
        _show(result, path, arguments.json)
    return 1 if all(row["error"] for row in result.rows) else 0


class Result:
    """The record while it grows; every row is written at once."""

    def __init__(self, arguments: argparse.Namespace, machine: str):
        suffix = f"-{arguments.preset}" if arguments.preset else "-quick" if arguments.quick else ""
        self.name = arguments.name or f"{machine}-attention{suffix}"
        self.output = arguments.output
        self.rows: list[dict[str, Any]] = []
        self.peaks: dict[str, Any] = {}
        self.fields: dict[str, Any] = {
            **record.stamp(),
            "benchmark": "attention",
            "command": record.command("directkv"),
            "peaks": self.peaks,
            "rows": self.rows,
        }

    def add(self, row: dict[str, Any]) -> None:
        """One more row, written."""
        self.rows.append(row)
        self.write()

    def add_counters(self, cases: list[Case], counted: list[dict[str, Any]]) -> None:
        """What ncu counted; rows of the very case that was counted get it too."""
        self.fields["counters"] = counted
        for entry in counted:
            identity = Case.from_json(entry["case"]).row()
            for row in self.rows:
                if all(row[key] == value for key, value in identity.items() if value is not None):
                    row["link_bytes"] = entry["link_bytes"]
            entry["case"] = {key: value for key, value in identity.items() if value is not None}

    def write(self):
        """The path of the record."""
        return record.write(self.fields, self.name, self.output)


def _measure(cases: list[Case], result: Result, total: int, arguments) -> None:
    order = {"repeats": arguments.repeats}
    fields = [case.to_json() for case in cases]
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # device memory is taken as it is needed
    for message in workers.run_cases([*COMMAND, "--worker"], fields, order, env):
        if "peaks" in message:
            result.peaks.update(message["peaks"])
            continue
        case = cases[message["index"]]
        row = message.get("row") or case.row() | {"error": message["error"]}
        result.add(row)
        figures = row["error"] or f"{row['us']:.1f} us, {row['gb_per_s']:.1f} GB/s"
        print(f"[{len(result.rows)}/{total}] {case.label}: {figures}", file=sys.stderr, flush=True)


def _show(result: Result, path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.fields), flush=True)
    else:
        for placement in attention_cases.PLACEMENTS:
            rows = [row for row in result.rows if row["placement"] == placement]
            if rows:
                print(f"\nkeys and values in {placement} memory")
                print("\n".join(table.lines(COLUMNS, [_readable(row) for row in rows])))
    print(f"{len(result.rows)} rows in {path}", file=sys.stderr)


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    def mb(nbytes: int | None) -> float | None:
        return None if nbytes is None else nbytes / 1e6

    lengths = row["lengths"]
    return row | {
        "length": f"{min(lengths)}..{max(lengths)}" if lengths else row["length"],
        "heads": f"{row['num_query_heads']}/{row['num_kv_heads']}x{row['head_dim']}",
        "num_ctas": row["num_ctas"] or "auto" if row["implementation"] == "cuda" else None,
        "kv_mb": mb(row["kv_bytes"]),
        "link_mb": mb(row["link_bytes"]),
        "temp_mb": mb(row["hbm_temp_bytes"]),
    }
