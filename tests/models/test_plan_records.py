"""`models.plan` against the committed records of whole decode steps on an H200."""

import dataclasses
import json
from pathlib import Path

import pytest

from directkv_jax.bench.decode_cases import SHAPES, Case
from directkv_jax.models import ModelConfig, plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDS = sorted(RESULTS.glob("*-h200-decode*.json"))
H200 = plan.Machine.published("h200", plan.GPUS["h200"])
WARMUP = Case.warmup  # steps before the timed ones

pytestmark = pytest.mark.skipif(not RECORDS, reason="no records of benchmarks: not a checkout")


def recorded():
    """(config, workload at the middle of the timed steps, row) of all rows of our own kernels."""
    for file in RECORDS:
        for row in json.loads(file.read_text())["rows"]:
            if row["implementation"] == "cuda":
                shape = {**SHAPES[row["shape"]], "num_hidden_layers": row["layers"]}
                config = ModelConfig.from_dict({"model_type": "llama", **shape})
                context = row["length"] + WARMUP + row["steps"] // 2
                yield config, plan.Workload(row["batch"], context, row["placement"]), row


def test_step_times_of_all_records():
    errors = {"host": [], "device": []}
    for config, work, row in recorded():
        seconds = plan.make_plan(config, work, H200).step.total_s
        errors[row["placement"]].append(1e3 * seconds / row["ms_per_step"] - 1)
    assert min(len(each) for each in errors.values()) >= 6
    assert max(map(abs, errors["host"] + errors["device"])) < 0.1


def test_step_times_of_checkpoints():
    """Of loaded folders: against published figures, and as planned on that machine beforehand."""
    files = sorted(RESULTS.glob("*-h200-checkpoint*.json"))
    assert files
    for row in (row for file in files for row in json.loads(file.read_text())["rows"]):
        context = row["length"] + row["steps"] // 2
        work = plan.Workload(row["batch"], context, row["placement"], row["dtype"])
        expected = 1e3 * plan.make_plan(plan.shape(row["shape"]), work, H200).step.total_s
        assert row["ms_per_step"] == pytest.approx(expected, rel=0.1)
        assert row["ms_per_step"] == pytest.approx(row["planned_ms_per_step"], rel=0.1)


def test_bytes_of_all_records():
    for config, work, row in recorded():
        sizes = plan.sizes_of(config, work)
        read = {"host": sizes.read_host_bytes, "device": sizes.read_device_bytes}
        assert read.pop(row["placement"]) == row["kv_bytes"]
        assert sum(read.values()) == 0
        assert sizes.read_weight_bytes == row["weight_bytes"]
        assert sizes.weight_bytes == row["parameter_bytes"]
        held = plan.sizes_of(
            config, dataclasses.replace(work, context=row["length"] + WARMUP + row["steps"])
        )
        assert held.kv_host_bytes == row["host_bytes"]
        assert held.kv_device_bytes == row["kv_bytes_device"]
        # A step needs less than reading prompts, which the plan has room for.
        room = held.device_bytes - row["hbm_peak_bytes"]
        assert 0 <= room <= held.activation_bytes


def test_bandwidths_of_all_records():
    for file in RECORDS:
        if peaks := json.loads(file.read_text())["peaks"]:
            copy = peaks["copy_engine_gb_per_s"] * 1e9
            measured = plan.Machine.measured("NVIDIA H200", 1 << 36, 1 << 36, copy)
            zero_copy = peaks["zero_copy"]["gb_per_s"] * 1e9
            assert measured.link_bytes_per_s == pytest.approx(zero_copy, rel=0.01)
            assert measured.hbm_bytes_per_s == pytest.approx(
                peaks["hbm_read"]["gb_per_s"] * 1e9, rel=0.01
            )
            assert measured.validated
            assert H200.link_bytes_per_s == pytest.approx(zero_copy, rel=0.01)
