"""`directkv bench plot`: figures drawn from the records that the other benchmarks wrote.

Of records of `bench attention`: the share of the link's peak against the context, and GB/s against
the thread blocks used. Of records of `bench decode` and of `benchmarks/hf_offloaded.py`: time of a
step and peak of device memory against the context, one figure for each model, batch and memory
limit. A figure without data is skipped, and said to be. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]  # each with its record under "record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `directkv bench plot`."""
    add = parser.add_argument
    add("records", nargs="+", metavar="RECORD", help="JSON files that the benchmarks wrote")
    add("--output", default="docs", metavar="DIR", help="where the PNGs go (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Draws what there is data for; the exit status is 1 if there is for nothing."""
    rows = load(arguments.records)
    try:
        from directkv_jax.bench import figures
    except ModuleNotFoundError as error:
        package = (error.name or "matplotlib").partition(".")[0]
        raise ImportError(
            f"drawing needs the package `{package}`. Install it with: "
            'pip install "directkv-jax[bench]"'
        ) from error
    folder = Path(arguments.output)
    drawn = 0
    for name, draw, data, lacking in planned(rows, figures):
        if not data:
            print(f"{name}.png skipped: {lacking}", file=sys.stderr)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        figure = draw(data, footnote(data))
        figure.savefig(folder / f"{name}.png", dpi=160)
        print(folder / f"{name}.png")
        drawn += 1
    return 0 if drawn else 1


def load(paths: Sequence[str]) -> dict[str, Rows]:
    """The rows of the records by benchmark.

    Raises:
      ValueError: a file is no record.
    """
    found: dict[str, Rows] = collections.defaultdict(list)
    for path in paths:
        try:
            record = json.loads(Path(path).read_text())
            kind, rows = record["benchmark"], record["rows"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} should be a record of `directkv bench`, but is not: {error!r}."
            ) from error
        stamp = {name: value for name, value in record.items() if name != "rows"}
        found[kind] += [{**row, "record": stamp} for row in rows]
    return found


def planned(rows: dict[str, Rows], figures: Any) -> Iterator[tuple[str, Any, Rows, str]]:
    """(name, function that draws it, its rows, what is lacking when there are none) of each."""
    attention = [row for row in rows["attention"] if _plain(row)]
    ours = [row for row in attention if row["implementation"] == "cuda"]
    shares = [r for r in ours if r.get("num_ctas") is None and r.get("share_of_zero_copy_peak")]
    yield (
        "share-against-context", figures.shares, _one_shape(shares),
        "no `bench attention` row of the host placement has a share of the zero-copy peak",
    )  # fmt: skip
    by_ctas = [row for row in ours if row.get("num_ctas") and row.get("gb_per_s")]
    yield (
        "bandwidth-against-ctas", figures.ctas, _one_shape(by_ctas),
        "no `bench attention` row of the host placement was given `num_ctas`",
    )  # fmt: skip
    groups = decode_groups([*rows["decode"], *rows["hf_offloaded"]])
    reason = "there are no `bench decode` rows of two or more lengths"
    for suffix, group in groups.items() or {"": []}.items():
        timed = [row for row in group if row.get("ms_per_step") or out_of_memory(row)]
        yield f"decode-time{suffix}", figures.decode_time, timed, reason
        held = [row for row in group if row.get("hbm_peak_bytes")]
        lacking = reason if not group else f"no row of {suffix.strip('-')} has `hbm_peak_bytes`"
        yield f"decode-memory{suffix}", figures.decode_memory, held, lacking


def _plain(row: dict[str, Any]) -> bool:
    """Whether an attention row is of the host placement and differs in nothing but its size."""
    special = row.get("ragged") or row.get("appends") or row.get("error")
    return row.get("placement") == "host" and not special and bool(row.get("length"))


def _one_shape(rows: Rows) -> Rows:
    """The rows of the shape that has most of them: a figure is of one shape."""
    counts = collections.Counter(_shape(row) for row in rows)
    return [row for row in rows if _shape(row) == counts.most_common(1)[0][0]]


def _shape(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("num_query_heads", "num_kv_heads", "head_dim", "dtype", "query_tokens")
    return tuple(row.get(name) for name in names)


def decode_groups(rows: Rows) -> dict[str, Rows]:
    """Rows that differ in placement and length only, by a suffix for the file's name."""
    groups: dict[str, Rows] = collections.defaultdict(list)
    for row in rows:
        limit = row.get("hbm_limit_gb")
        suffix = f"-{row['shape']}-L{row['layers']}-b{row['batch']}"
        groups[suffix + (f"-{limit:g}gb" if limit else "")].append(row)
    return {
        suffix: group
        for suffix, group in sorted(groups.items())
        if len({row["length"] for row in group}) > 1
    }


def out_of_memory(row: dict[str, Any]) -> bool:
    """Whether an error row ran out of device or host memory."""
    text = row.get("error") or ""
    signs = ("RESOURCE_EXHAUSTED", "MemoryError", "out of memory", "OutOfMemory", "SIGKILL")
    return any(sign.lower() in text.lower() for sign in signs)


def footnote(rows: Iterable[dict[str, Any]]) -> str:
    """Hardware, versions, commit and date of the records behind a figure, one line for each."""
    return "\n".join(dict.fromkeys(_stamp(row["record"]) for row in rows))


def _stamp(record: dict[str, Any]) -> str:
    gpus = record.get("gpus") or [{"name": (record.get("machine") or {}).get("cpu", "no GPU")}]
    gpu, versions, commit = gpus[0], record.get("versions") or {}, record.get("commit") or {}
    link = ""
    if "pcie.link.gen.max" in gpu:
        link = f" (PCIe {gpu['pcie.link.gen.max']} x{gpu['pcie.link.width.max']})"
    known = (("jax", "jax"), ("torch", "torch"), ("transformers", "transformers"))
    parts = [gpu["name"] + link]
    parts += [f"{label} {versions[name]}" for name, label in known if versions.get(name)]
    if versions.get("cuda_driver"):
        parts.append(f"driver of CUDA {versions['cuda_driver']}")
    if commit.get("hash"):
        changed = " with changes" if commit.get("dirty") else ""
        parts.append(f"commit {commit['hash'][:10]}{changed}")
    return ", ".join([*parts, str(record.get("date", ""))[:10]])
