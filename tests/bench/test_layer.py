"""`directkv bench layer` on a CPU: its rows, and that the programs it times agree."""

from __future__ import annotations

import json

import jax
import pytest

from directkv_jax.cli import main

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="its figures are expected of the CPU implementations"
)
SMALL = (
    *("--heads", "4/2", "--head-dim", "32", "--layers", "2", "--length", "96"),
    *("--batch", "2", "--dtype", "float32", "--repeats", "1"),
)


def test_a_record_of_all_programs(tmp_path, capsys):
    assert main(["bench", "layer", *SMALL, "--json", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == record
    names = [(row["placement"], row["implementation"]) for row in record["rows"]]
    assert names == [
        ("device", "fused"), ("device", "unfused"), ("device", "jax"),
        ("host", "fused"), ("host", "unfused"),
    ]  # fmt: skip
    for row in record["rows"]:
        assert row["error"] is None
        assert row["us"] > 0
        assert row["weight_bytes"] == 4 * 128 * 8 * 32
        assert row["kv_bytes"] == 2 * 2 * 96 * 2 * 32 * 4
        assert row["implementation"] == "jax" or row["difference"] < 1e-6


def test_what_a_program_cannot_do_is_in_its_row(tmp_path):
    options = (*SMALL, "--implementation", "fused", "--head-dim", "36", "--placement", "host")
    assert main(["bench", "layer", *options, "--output", str(tmp_path)]) == 1
    (path,) = tmp_path.iterdir()
    (row,) = json.loads(path.read_text())["rows"]
    assert "head_dim" in row["error"]
    assert row["us"] is None
