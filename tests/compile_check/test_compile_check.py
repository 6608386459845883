"""Compiled for an H200, no program of ours copies the host cache; the check would see one that did.

The programs are compiled in a process of their own: it loads the CUDA plugin and may register
stand-ins for the CUDA handlers, neither of which belongs in a process that runs anything. Those of
one layer loop and one control are compiled here; `scripts/compile_check.py` compiles all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flax", reason="the programs include Flax models")
from compile_check import target
from compile_check.flax_programs import flax_programs
from compile_check.programs import core_programs

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_check.py"
NAMES = [
    program.name
    for program in core_programs() + flax_programs()
    if "layers unrolled" in program.name or program.name == "control: cache not donated"
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    if reason := target.missing():
        pytest.skip(reason)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "-k", *NAMES],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert rows, run.stderr[-4000:]
    return {row["program"]: row for row in rows}


@pytest.mark.parametrize("name", NAMES)
def test_cache_is_used_where_it_lies(results, name):
    row = results[name]
    assert row["ok"], row["problems"]
