"""Tests of what only a CUDA GPU can show; skipped, with the reason, elsewhere.

DIRECTKV_GPU_FIGURES names a JSON file; what the tests measure is merged into it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import directkv_jax


@pytest.fixture(autouse=True)
def _cuda():
    if reason := directkv_jax.unsupported_reason("cuda", placement="host", head_dim=128):
        pytest.skip(f"needs a CUDA GPU: {reason}")


@pytest.fixture
def measure():
    """Runs a script of this folder in its own process; records and returns its JSON object.

    JAX's peak counter cannot be reset, so every figure takes a process. It must not claim most of
    the memory that the process of the tests already holds.
    """

    def run(script: str, *args: object, name: str) -> dict:
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, str(Path(__file__).parent / script), *map(str, args)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        figures = json.loads(done.stdout.splitlines()[-1])
        record(name, figures)
        return figures

    return run


def record(name: str, figures: dict) -> None:
    """Merges figures into the file that DIRECTKV_GPU_FIGURES names, if it does."""
    if not (target := os.environ.get("DIRECTKV_GPU_FIGURES")):
        return
    path = Path(target)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, name: figures}, indent=2) + "\n")
