"""`directkv bench plot` over made-up records: which figures it draws, skips and refuses."""

from __future__ import annotations

import json
import sys

import pytest

from directkv_jax import bench
from directkv_jax.bench import plot
from directkv_jax.cli import main

pytest.importorskip("matplotlib", reason="the `bench` extra is not installed")

STAMP = {
    "date": "2026-01-02T03:04:05+00:00",
    "machine": {"cpu": "a processor"},
    "gpus": [{"name": "NVIDIA H200", "pcie.link.gen.max": "5", "pcie.link.width.max": "16"}],
    "versions": {"jax": "0.11.2", "cuda_driver": "13.0"},
    "commit": {"hash": "0123456789abcdef", "dirty": True},
}
LENGTHS = (8192, 32768, 131072)


def attention_row(batch, length, **fields):
    share = fields.pop("share", 0.9)
    return {
        "implementation": "cuda", "placement": "host", "batch": batch, "length": length,
        "num_query_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
        "query_tokens": 1, "num_ctas": None, "ragged": False, "appends": False, "error": None,
        "gb_per_s": 51.3 * share, "share_of_zero_copy_peak": share, **fields,
    }  # fmt: skip


def decode_row(placement, length, **fields):
    ms = {"host": 84, "device": 7, "staged": 80, "hbm-jax": 8, "hf-offloaded": 400}[placement]
    held = 16 + (length / 8192 if placement in ("device", "hbm-jax") else 0)
    row = {
        "shape": "llama-8b", "layers": 32, "placement": placement, "batch": 1, "length": length,
        "dtype": "bfloat16", "hbm_limit_gb": None, "parameter_bytes": 16 << 30,
        "ms_per_step": ms * length / 32768, "hbm_peak_bytes": int(held * 2**30), **fields,
    }  # fmt: skip
    if "error" in row:
        del row["ms_per_step"], row["hbm_peak_bytes"]
    return row


@pytest.fixture
def write(tmp_path):
    def write(benchmark, rows):
        path = tmp_path / f"{benchmark}.json"
        path.write_text(json.dumps({**STAMP, "benchmark": benchmark, "rows": rows}))
        return str(path)

    return write


@pytest.fixture
def records(write):
    attention = [
        attention_row(batch, length, share=0.99 - 0.1 / batch / (length / 8192))
        for batch in (1, 4, 16)
        for length in LENGTHS
    ]
    attention += [
        attention_row(16, 32768, num_ctas=count, share=min(0.98, count / 9))
        for count in (1, 2, 4, 8, 16, 32)
    ]
    oom = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
    decode = [decode_row(place, length) for place in ("host", "staged") for length in LENGTHS]
    decode += [decode_row("hbm-jax", length) for length in LENGTHS[:2]]
    decode += [decode_row("hbm-jax", LENGTHS[2], error=oom)]
    hf = [decode_row("hf-offloaded", length) for length in LENGTHS[:2]]
    hf += [decode_row("hf-offloaded", LENGTHS[2], error="OutOfMemoryError: CUDA out of memory")]
    return [write("attention", attention), write("decode", decode), write("hf_offloaded", hf)]


def test_all_figures(records, tmp_path, capsys):
    folder = tmp_path / "docs"
    assert main(["bench", "plot", *records, "--output", str(folder)]) == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "share-against-context.png",
        "bandwidth-against-ctas.png",
        "decode-time-llama-8b-L32-b1.png",
        "decode-memory-llama-8b-L32-b1.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 4
    assert captured.err == ""


def test_what_has_no_data_is_skipped_and_said(write, tmp_path, capsys):
    rows = [attention_row(1, length) for length in LENGTHS]
    rows.append({**attention_row(1, 8192), "placement": "device", "num_ctas": 8})
    rows.append({**attention_row(1, None), "ragged": True, "num_ctas": 8})
    path = write("attention", rows)
    assert main(["bench", "plot", path, "--output", str(tmp_path / "docs")]) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == [str(tmp_path / "docs" / "share-against-context.png")]
    skipped = captured.err.splitlines()
    assert [line.split()[0] for line in skipped] == [
        "bandwidth-against-ctas.png", "decode-time.png", "decode-memory.png",
    ]  # fmt: skip
    assert "`num_ctas`" in skipped[0]


def test_nothing_to_draw(write, tmp_path, capsys):
    path = write("decode", [decode_row("host", 8192)])
    assert main(["bench", "plot", path, "--output", str(tmp_path / "docs")]) == 1
    assert not (tmp_path / "docs").exists()
    assert capsys.readouterr().err.count("skipped") == 4


def test_rows_without_memory_statistics(write, tmp_path, capsys):
    rows = [decode_row("host", length, hbm_peak_bytes=None) for length in LENGTHS]
    assert main(["bench", "plot", write("decode", rows), "--output", str(tmp_path / "docs")]) == 0
    assert "no row of llama-8b-L32-b1 has `hbm_peak_bytes`" in capsys.readouterr().err


def test_groups_differ_in_placement_and_length_only():
    rows = [decode_row("host", length, batch=b) for length in LENGTHS for b in (1, 4)]
    rows += [decode_row("host", length, hbm_limit_gb=24.0) for length in LENGTHS]
    rows += [decode_row("host", 8192, shape="llama-1b")]  # one length makes no line
    groups = plot.decode_groups(rows)
    assert set(groups) == {"-llama-8b-L32-b1", "-llama-8b-L32-b4", "-llama-8b-L32-b1-24gb"}
    assert {len(group) for group in groups.values()} == {3}


def test_footnote_names_machine_versions_and_commit(records):
    rows = plot.load(records)["attention"]
    assert plot.footnote(rows) == (
        "NVIDIA H200 (PCIe 5 x16), jax 0.11.2, driver of CUDA 13.0, "
        "commit 0123456789 with changes, 2026-01-02"
    )


@pytest.mark.parametrize("text", ["not JSON", "{}", "[1]", "null"])
def test_a_file_that_is_no_record(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["bench", "plot", str(path)]) == 2
    assert "should be a record of `directkv bench`" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(records, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "directkv_jax.bench.figures", raising=False)
    monkeypatch.delattr(bench, "figures", raising=False)
    assert main(["bench", "plot", *records]) == 2
    assert 'pip install "directkv-jax[bench]"' in capsys.readouterr().err
