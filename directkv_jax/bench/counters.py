"""Bytes on the CPU-GPU link, counted by the GPU's own counters through Nsight Compute.

`lts__t_sectors_srcunit_tex_aperture_sysmem.sum` counts the 32-byte sectors that the SMs ask of host
memory, bulk copies included. What the copy engine moves is not among them.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from directkv_jax.bench.attention_cases import Case

METRIC = "lts__t_sectors_srcunit_tex_aperture_sysmem.sum"
SECTOR_BYTES = 32
KERNELS = "regex:attend|chunk"  # ours and the naive one; neither the fills nor the marks
LARGEST_KV_BYTES = 64 << 20
TIMEOUT_S = 300
_SMALL = 8192  # tokens of the one row that stands in for a larger case


def link_bytes(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """For each implementation that reads host memory by kernel, the bytes one small case moves.

    Returns:
      one `{"case", "kv_bytes", "link_bytes", "reason"}` each; link_bytes is null, with a reason,
      where it could not be counted.
    """
    picked: dict[str, Case] = {}
    for case in cases:
        if case.placement == "host" and case.implementation in ("cuda", "naive"):
            smallest = picked.get(case.implementation)
            if smallest is None or case.kv_bytes < smallest.kv_bytes:
                picked[case.implementation] = case
    counted = []
    for case in picked.values():
        case = dataclasses.replace(case, layers=1, appends=False)
        if case.kv_bytes > LARGEST_KV_BYTES:
            case = dataclasses.replace(case, lengths=(_SMALL,))
        total, reason = _count(case)
        counted.append(
            {
                "case": case.to_json(),
                "kv_bytes": case.kv_bytes,
                "link_bytes": total,
                "reason": reason,
            }
        )
    return counted


def _count(case: Case) -> tuple[int | None, str | None]:
    worker = [sys.executable, "-P", "-m", "directkv_jax", "bench", "attention", "--worker"]
    order = {"cases": [case.to_json()], "repeats": 1, "once": True}
    try:
        done = profile(worker, METRIC, KERNELS, json.dumps(order))
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"ncu: {error}"
    if failed := [row["error"] for row in _rows(done.stdout) if row["error"]]:
        return None, failed[0]
    sectors = parse(done.stdout, METRIC)
    if not sectors:
        tail = " ".join((done.stdout + done.stderr).split())[-300:]
        return None, f"ncu (exit status {done.returncode}) reported no kernel: {tail}"
    return sum(value for _, value in sectors) * SECTOR_BYTES, None


def profile(
    program: Sequence[str], metric: str, kernels: str, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program under ncu, whose CSV then follows its output.

    Args:
      program: the command.
      metric: what is counted, for every launch.
      kernels: which, as ncu's `--kernel-name`.
      given: its standard input.

    Raises:
      FileNotFoundError: there is no ncu.
      subprocess.TimeoutExpired: it took longer than `TIMEOUT_S`.
    """
    if not (ncu := shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")):
        raise FileNotFoundError("Nsight Compute was not found")
    command = [
        ncu, "--clock-control", "none", "--metrics", metric, "--kernel-name", kernels,
        "--target-processes", "all", "--csv", "--print-units", "base", *program,
    ]  # fmt: skip
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, env=env,
        check=False,
    )  # fmt: skip


def parse(output: str, metric: str) -> list[tuple[str, int]]:
    """(name, metric) of every kernel in ncu's CSV, which follows the program's own output."""
    lines = output.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(io.StringIO("\n".join(lines[begin:])))
    return [
        (row.get("Kernel Name", ""), round(float(row["Metric Value"].replace(",", ""))))
        for row in rows
        if row.get("Metric Name") == metric
    ]


def _rows(output: str) -> list[dict[str, Any]]:
    found = []
    for line in output.splitlines():
        if line.startswith('{"index"'):
            found.append(json.loads(line)["row"])
    return found
