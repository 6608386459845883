"""`directkv bench attention` on a CPU: what it writes, and what it makes of trouble."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from directkv_jax.bench import (
    attention_cases,
    attention_oracle,
    attention_presets,
    counters,
    workers,
)
from directkv_jax.cli import main

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="its figures are expected of the CPU implementations"
)
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}
FIGURES = ("us", "gb_per_s", "kv_bytes", "max_abs_error", "relative_error")


def command(*options: str) -> list[str]:
    return [sys.executable, "-P", "-m", "directkv_jax", "bench", "attention", *options]


def record_in(folder: Path) -> dict:
    (path,) = folder.iterdir()  # no unfinished file is left behind either
    return json.loads(path.read_text())


def test_quick_writes_a_record(tmp_path):
    done = subprocess.run(
        command("--quick", "--length", "1k", "--batch", "2", "--json", "--output", str(tmp_path)),
        env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = record_in(tmp_path)
    assert json.loads(done.stdout) == record
    assert record["benchmark"] == "attention"
    assert record["command"].startswith("directkv bench attention --quick")
    assert {"date", "machine", "versions", "commit", "peaks"} <= record.keys()
    rows = record["rows"]
    assert {row["implementation"] for row in rows} == {"cpu", "xla"}
    for row in rows:
        assert row["error"] is None
        assert all(row[name] > 0 for name in FIGURES)
        assert len(row["us_all"]) == 5
        assert row["relative_error"] < 1e-2  # bfloat16 keeps 8 bits
        assert row["share_of_zero_copy_peak"] is None  # there is no link here
        assert row["link_bytes"] is None


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(*options) -> the record; the cases run in a process of their own all the same."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def run(*options: str) -> dict:
        assert main(["bench", "attention", *options, "--output", str(tmp_path)]) == 0
        return record_in(tmp_path)

    return run


def test_ragged_steps_over_layers(run):
    record = run(
        "--batch", "3", "--heads", "4/2", "--head-dim", "64", "--repeats", "1",
        "--implementation", "cpu", "--ragged", "--seed", "32",  # 174, 463 and 881 tokens
        "--layers", "2", "--appends",
    )  # fmt: skip
    (row,) = record["rows"]
    assert row["ragged"]
    assert row["length"] is None
    assert row["kv_bytes"] == sum(row["lengths"]) * 2 * 2 * 64 * 2
    assert row["relative_error"] < 1e-2


def test_a_baseline_and_what_is_unsupported(run, capsys):
    record = run(
        "--length", "300", "--batch", "1", "--head-dim", "100", "64", "--implementation", "cpu",
        "naive", "staged", "--dtype", "float32", "--heads", "4/2", "--repeats", "1",
    )  # fmt: skip
    rows = {(row["implementation"], row["head_dim"]): row for row in record["rows"]}
    staged = rows["staged", 64]
    assert staged["relative_error"] < 1e-5
    assert "attention by xla" in staged["note"]
    assert "cudnn: " in staged["note"]  # and why not by that
    assert "multiple of 8" in rows["cpu", 100]["error"]
    assert rows["cpu", 100]["us"] is None
    assert "needs a CUDA GPU" in rows["naive", 64]["error"]
    assert rows["cpu", 64]["us"] > 0
    assert "multiple of 8" in capsys.readouterr().out


# A process started in the background of a script ignores Ctrl-C, and so do its children.
HEARS_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_interrupted_it_leaves_what_it_has(tmp_path):
    lengths = [str(256 + 64 * n) for n in range(40)]
    bench = command("--batch", "1", "--length", *lengths, "--output", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C, *bench], env=ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        first = next(line for line in process.stderr if line.startswith("[1/"))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert first.startswith("[1/80]")
    assert process.returncode == 130
    assert "interrupted" in rest
    record = record_in(tmp_path)
    assert record["interrupted"]
    assert 1 <= len(record["rows"]) < 80
    assert record["rows"][0]["us"] > 0


def test_dry_run_lists_the_cases(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options = ["--dry-run", "--batch", "2", "--length", "1k", "8k", "--heads", "8/2"]
    assert main(["bench", "attention", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0] == "host cpu B=2 S=1024 8/2x128 bfloat16: 2.1 MB"


@pytest.mark.parametrize("preset", attention_presets.PRESETS)
def test_presets_expand(preset, capsys, monkeypatch):
    monkeypatch.setattr("directkv_jax.bench.record.gpus", lambda: [{"name": "one"}])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert main(["bench", "attention", "--dry-run", "--preset", preset]) == 0
    assert " cuda " in capsys.readouterr().out


def test_bad_options_are_refused(capsys):
    for options in (["--heads", "8/3"], ["--batch", "0"], ["--implementation", "magic"]):
        with pytest.raises(SystemExit) as status:
            main(["bench", "attention", *options])
        assert status.value.code == 2
    assert "N a multiple of K" in capsys.readouterr().err


def test_a_case_that_kills_its_worker_costs_one_row(monkeypatch):
    # A stand-in for the worker: it dies at the case "bad", and hangs at the case "slow".
    program = """if True:
        import json, os, signal, sys, time
        print("noise")
        for index, case in enumerate(json.load(sys.stdin)["cases"]):
            if case == "bad":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "slow":
                time.sleep(60)
            print(json.dumps({"index": index, "row": case}), flush=True)
        """
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", program], **options)
    )
    cases = ["a", "bad", "b", "slow", "c"]
    got = {m["index"]: m for m in workers.run_cases((), cases, {}, timeout_s=5)}
    assert [got[i].get("row") for i in range(5)] == ["a", None, "b", None, "c"]
    assert "SIGKILL" in got[1]["error"]
    assert "nothing happened for 5 s" in got[3]["error"]


def test_oracle_weights_tokens_by_their_number():
    random = np.random.default_rng(0)
    query = random.standard_normal((2, 3, 4, 8), np.float32)
    keys, values = random.standard_normal((2, 5, 2, 8), np.float32)
    fresh = random.standard_normal((2, 2, 3, 2, 8), np.float32)
    counts = np.array([[3, 1, 0, 2, 1], [1, 0, 0, 0, 0]], np.float32)
    got = attention_oracle.attention(query, keys, values, counts, fresh)
    for b, t, n in np.ndindex(2, 3, 4):
        picked = np.repeat(np.arange(5), counts[b].astype(int))
        k = np.concatenate([keys[picked, n // 2], fresh[0][b, : t + 1, n // 2]])
        v = np.concatenate([values[picked, n // 2], fresh[1][b, : t + 1, n // 2]])
        weights = np.exp(k @ query[b, t, n] / np.sqrt(8))
        want = weights @ v / weights.sum()
        np.testing.assert_allclose(got[b, t, n], want, rtol=1e-4, atol=1e-6)


def test_counters_of_ncu_are_read_and_missing_ones_explained(monkeypatch):
    output = (
        '{"index": 0, "row": {"error": null}}\n==PROF== Disconnected\n'
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        f'"0","attend_kernel","{counters.METRIC}","sector","1,048,576"\n'
        f'"1","attend_merge","{counters.METRIC}","sector","2"\n'
    )
    assert counters.parse(output, counters.METRIC) == [
        ("attend_kernel", 1048576),
        ("attend_merge", 2),
    ]
    monkeypatch.setattr(counters.shutil, "which", lambda *_, **__: None)
    (entry,) = counters.link_bytes([attention_cases.Case("host", "cuda", (32768,) * 16)])
    assert entry["link_bytes"] is None
    assert "not found" in entry["reason"]
    assert entry["kv_bytes"] == 8192 * 4096
