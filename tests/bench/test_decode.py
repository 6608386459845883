"""`directkv bench decode`: the same model over every kind of cache, its sums, rows and errors."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from directkv_jax.bench import decode, decode_caches, decode_worker
from directkv_jax.bench.decode_caches import one_device
from directkv_jax.bench.decode_cases import PLACEMENTS, PRESETS, SHAPES, Case, expand, reduce_to
from directkv_jax.bench.decode_child import environment
from directkv_jax.bench.decode_model import RandomModel
from directkv_jax.cli import build_parser, main

TINY = Case("test", "host", batch=2, length=200, steps=3, warmup=1)


@pytest.fixture(scope="module")
def logits():
    """Of some steps that start alike, for each placement: float32 `[steps, B, vocabulary]`."""
    model = RandomModel(TINY.config, one_device("device"))
    weights = model.make_weights()
    short = dataclasses.replace(TINY, length=6)  # so that every token weighs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_caches, "CHUNK", 4)  # one and a half chunks
        return {
            placement: _logits(dataclasses.replace(short, placement=placement), model, weights)
            for placement in PLACEMENTS
        }


def _logits(case: Case, model: RandomModel, weights) -> np.ndarray:
    cache, _ = decode_worker._filled(case)
    attention = None if case.placement in ("host", "device") else "xla"

    def step(weights, cache, tokens):
        return model.logits(weights, cache, tokens, attention)

    step = jax.jit(step, donate_argnums=1)
    found = []
    for tokens in np.random.default_rng(0).integers(0, 256, (3, case.batch, 1), np.int32):
        out, cache = step(weights, cache, jax.device_put(tokens, one_device("device")))
        found.append(np.asarray(out[:, 0]))
    assert np.asarray(cache.lengths).tolist() == [case.length + 3] * case.batch
    decode_worker.delete(cache)
    return np.stack(found)


@pytest.mark.parametrize("placement", [p for p in PLACEMENTS if p != "host"])
def test_every_cache_holds_and_gives_the_same(logits, placement):
    # Steps 2 and 3 read what the steps before wrote; bfloat16 rounds at other places.
    scale = np.abs(logits["host"]).max()
    np.testing.assert_allclose(logits[placement], logits["host"], atol=0.03 * scale)
    assert np.isfinite(logits["host"]).all()
    assert np.std(logits["host"]) > 0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_row_has_its_figures_and_says_what_it_lacks(placement, compilations, monkeypatch):
    compiled = []
    timed = decode_worker._time

    def counting(*arguments):
        before = compilations()
        result = timed(*arguments)
        compiled.append(compilations() - before)
        return result

    monkeypatch.setattr(decode_worker, "_time", counting)
    case = dataclasses.replace(TINY, placement=placement)
    row = decode_worker.measure(case)
    assert row["error"] is None
    assert compiled == [0]  # it was compiled beforehand, when there were no weights yet
    assert len(row["ms_all"]) == 3
    assert min(row["ms_all"]) > 0
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms_per_step"])
    assert row["finite_logits"] is True
    hosted = placement in ("host", "staged")
    assert (row["host_bytes"] > 0) == hosted
    assert (row["kv_bytes_device"] > 0) == (not hosted)
    assert row["host_bytes"] + row["kv_bytes_device"] >= case.kv_bytes
    if jax.default_backend() == "cpu":
        assert row["link_gb_per_s"] is None
        assert row["hbm_peak_bytes"] is None
        assert len(row["notes"]) == 2  # no statistics, no peaks


def test_what_does_not_run_is_a_row_too():
    row = decode_worker.measure(dataclasses.replace(TINY, batch=1 << 40))
    assert row["batch"] == 1 << 40
    assert row["error"]
    assert row["ms_per_step"] is None


def test_bound_and_shares():
    case = Case("llama-8b", "host", batch=4, length=32768)
    peaks = {"zero_copy": {"gb_per_s": 50.0}, "hbm_read": {"gb_per_s": 4000.0}}
    seconds = case.kv_bytes / 50e9 + case.weight_bytes / 4000e9
    found = decode_worker.against(case, 2e3 * seconds, peaks)
    assert found["bound_ms"] == pytest.approx(1e3 * seconds)
    assert found["ratio_to_bound"] == pytest.approx(2.0)
    assert decode_worker.against(case, 1.0, {})["bound_ms"] is None
    device = dataclasses.replace(case, placement="device")
    seconds = (case.kv_bytes + case.weight_bytes) / 4000e9
    found = decode_worker.against(device, 1e3 * seconds, peaks)
    assert found["ratio_to_bound"] == pytest.approx(1.0)
    assert found["link_gb_per_s"] is None


def test_sizes_of_the_shapes():
    eight = Case("llama-8b", "host", 1, 32768)
    assert eight.parameter_bytes == 2 * 8_030_261_248  # of the published checkpoint
    assert eight.bytes_per_token == 128 << 10
    assert Case("llama-1b", "host", 1, 1).parameter_bytes == 2 * 1_235_814_400
    one = Case("llama-1b", "host", 1, 1)
    assert one.weight_bytes == one.parameter_bytes  # the embedding is the output projection too


def test_presets_and_options():
    def cases(*words):
        return decode.cases_of(build_parser().parse_args(["bench", "decode", *words]))

    for name in PRESETS:
        assert len(cases("--preset", name, "--layers", "1")) >= 4
    (case,) = cases("--preset", "reach", "--batch", "1", "--length", "8k", "--placement", "staged")
    assert (case.batch, case.length, case.placement) == (1, 8192, "staged")
    assert cases("--preset", "context", "--layers", "2")[0].hbm_limit_gb == 24.0
    assert {case.shape for case in cases("--shape", *SHAPES)} == set(SHAPES)


def test_long_rows_are_cut_to_the_host_memory():
    cases = expand(["llama-8b"], [1], [524288], PLACEMENTS)
    assert reduce_to(cases, 80 << 30) == cases
    assert {case.layers for case in reduce_to(cases, 33 << 30)} == {16}
    with pytest.raises(ValueError, match="One layer of S=524288"):
        reduce_to(cases, 1 << 30)


def test_memory_limit_of_a_process():
    free = environment(TINY, None)
    assert free["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert not free["XLA_PYTHON_CLIENT_MEM_FRACTION"]
    limited = environment(dataclasses.replace(TINY, hbm_limit_gb=24.0), 96 * 10**9)
    assert float(limited["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == 0.25
    for memory in (None, 24 * 10**9):
        with pytest.raises(ValueError, match="--hbm-limit"):
            environment(dataclasses.replace(TINY, hbm_limit_gb=24.0), memory)


def test_the_command_goes_on_after_an_error_and_writes_a_record(tmp_path, capsys):
    words = ["bench", "decode", "--preset", "quick", "--placement", "staged", "host"]
    options = ["--attention", "cudnn", "--json", "--output", str(tmp_path), "--name", "tiny"]
    assert main([*words, *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.glob("*-tiny.json")
    record = json.loads(path.read_text())
    assert record == printed
    assert record["benchmark"] == "decode"
    assert record["versions"]["jax"] == jax.__version__
    staged, host = record["rows"]
    assert bool(staged["error"]) == (jax.default_backend() == "cpu")  # no cuDNN here
    assert staged.keys() == host.keys()
    assert host["ms_per_step"] > 0


def test_dry_run_says_the_bytes(capsys):
    assert main(["bench", "decode", "--preset", "reach", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "14.96 GiB of weights, 16.01 GiB of cache in host memory" in lines[0]
