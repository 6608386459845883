import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from directkv_jax.cli import info, main
from directkv_jax.models import plan


@pytest.fixture
def planned(capsys):
    """(exit status, what is printed), of options as one string."""

    def call(options):
        status = main(["plan", *options.split()])
        return status, capsys.readouterr().out

    return call


def test_text_of_another_machine(planned):
    status, out = planned("--shape llama-3.1-8b --context 512k --gpu gh200")
    assert status == 0
    for part in (
        "8.03e9 parameters, 14.96 GiB of weights in bfloat16",
        "1 row of 524288 tokens, 128 KiB of keys and values per token",
        "gh200, by published figures",
        "host       64.00 GiB needed, available: 447.03 GiB",
        "fits       yes",
        "bound by link",
        "not validated on this hardware",
        "524288 tokens are more than max_position_embeddings 131072; RoPE is scaled (llama3)",
        "6 rows are the most that fit at 524288 tokens",
    ):
        assert part in out


def test_json_says_the_same(planned):
    options = "--shape llama-3.1-8b --context 32k --batch 4 --gpu h200 --host-memory 64G"
    status, out = planned(f"{options} --json")
    report = json.loads(out)
    assert (status, report["fits"]) == (0, True)
    assert report["host"] == {"needed": 16 << 30, "available": 64 << 30, "fits": True}
    step = report["step"]
    parts = sum(step[name] for name in ("link_s", "weights_s", "kv_s", "layers_s"))
    assert step["total_s"] == pytest.approx(parts)
    assert step["tokens_per_s"] == pytest.approx(4 / parts)
    text = planned(options)[1]
    assert f"{step['total_s'] * 1e3:.4g} ms at the full context" in text
    assert f"{report['largest_context']} tokens are the most that fit at batch 4" in text
    assert "not validated" not in text
    moved = report["other_placement"]["step"]["total_s"]
    assert f"--kv device fits, {moved * 1e3:.4g} ms a step" in text


def test_what_does_not_fit_says_what_to_change(planned):
    shape = "--shape llama-3.1-8b --context 128k --gpu h200 --host-memory 200G"
    status, out = planned(f"{shape} --batch 6 --kv device")
    assert status == 1
    assert "fits       no" in out
    assert "5 rows are the most that fit at 131072 tokens" in out
    assert "--kv host fits" in out
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in out
    status, out = planned("--shape llama-3.1-70b --context 4k --gpu h100 --host-memory 200G")
    assert status == 1
    assert "no context and no batch fits: the weights leave no room" in out
    status, out = planned("--shape phi-3-medium --context 8k --gpu rtx-4090 --dtype float32")
    assert status == 1
    assert "--dtype bfloat16 takes half" in out
    assert "float32 was not measured" in out


def test_a_smaller_budget_is_offered(planned):
    options = "--shape llama-3.1-8b --context 32k --gpu rtx-4090 --host-memory 64G"
    status, out = planned(f"{options} --prefill-bytes 4G")
    assert status == 1
    budget = next(line for line in out.splitlines() if "--prefill-bytes" in line).split()[2]
    assert planned(f"{options} --prefill-bytes {budget}")[0] == 0


def test_what_is_not_known_is_said(planned):
    status, out = planned("--shape qwen3-30b-a3b --context 8k --gpu h200")
    assert status == 0
    assert "fits       not known: host memory is not given" in out
    assert "--host-memory BYTES" in out
    assert "experts were not measured" in out
    assert "most that fit" not in out


def test_contexts_beyond_the_training(planned):
    def note(options):
        out = planned(f"{options} --gpu h200")[1]
        return [line for line in out.splitlines() if "max_position_embeddings" in line]

    assert "RoPE is not scaled" in note("--shape qwen3-8b --context 64k")[0]
    assert "no positions beyond" in note("--shape opt-6.7b --context 4k")[0]
    assert note("--shape opt-6.7b --context 2k") == []


def test_sliding_windows_are_told(planned):
    out = planned("--shape gemma-2-9b --context 8k --gpu h200")[1]
    assert "21 of 42 layers have a sliding window" in out


def test_this_machine_without_a_gpu(planned, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    status, out = planned("--shape smollm2-135m --context 4k --host-memory 8G")
    assert status == 0
    assert "weights in float32" in out
    assert "step       time unknown: there is no GPU" in out
    status, out = planned("--shape smollm2-135m --context 4k --json")
    report = json.loads(out)
    assert report["host"]["available"] > 0
    assert (report["device"], report["step"]) == (None, None)


@pytest.mark.parametrize(("kind", "known"), [("NVIDIA H200", True), ("NVIDIA X1", False)])
def test_this_machine_with_a_gpu(kind, known, planned, monkeypatch):
    device = SimpleNamespace(device_kind=kind, memory_stats=lambda: {"bytes_limit": 100 << 30})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(info, "link_bandwidth", lambda: 55.5e9)
    options = "--shape llama-3.1-8b --context 4k --host-memory 8G"
    report = json.loads(planned(f"{options} --json")[1])
    assert report["machine"]["name"] == kind
    assert report["device"]["available"] == 100 << 30
    assert report["workload"]["dtype"] == "bfloat16"
    assert (report["step"] is not None) == report["machine"]["validated"] == known
    if not known:
        assert "this GPU's bandwidth is not known" in planned(options)[1]


def test_a_folder_by_its_config_alone(tiny, tmp_path, planned):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    options = f"--model {tmp_path} --context 100 --page-size 16 --dtype float32 --json"
    report = json.loads(planned(options)[1])
    weights = sum(weight.size for weight in tiny.weights.values())
    assert report["sizes"]["parameters"] == weights
    assert report["sizes"]["kv_host_bytes"] == 2 * 2 * 2 * 16 * 4 * 112  # K and V, L, K, H, float32


def test_a_gguf_file(tiny, tmp_path, planned):
    file = tiny.write_gguf(tmp_path / "m.gguf", tiny.config, tiny.weights)
    report = json.loads(planned(f"--model {file} --context 64 --gpu h200 --json")[1])
    assert report["model"] == "m.gguf"
    assert report["sizes"]["parameters"] == sum(weight.size for weight in tiny.weights.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shape gpt-5", "`--shape` should be one of llama-3.1-8b, "),
        ("--shape opt-13b --gpu abacus", "`--gpu` should be one of h200, "),
        ("--model nowhere", "nowhere does not exist"),
        ("--shape opt-13b --page-size 20 --gpu h200", "`page_size` should be a multiple of 16"),
        ("--shape opt-13b --prefill-bytes 0 --gpu h200", "`prefill_bytes` should be a positive"),
    ],
)
def test_bad_input_is_one_line_and_status_2(options, message, capsys):
    assert main(["plan", "--context", "4k", *options.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("directkv: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--context 4k", "one of the arguments --model --shape is required"),
        ("--context 4k --shape a --model b", "not allowed with argument"),
        ("--shape opt-13b", "--context"),
        ("--shape opt-13b --context 0", "should be at least 1, but got 0"),
        ("--shape opt-13b --context 4k --batch 0", "should be at least 1, but got 0"),
        ("--shape opt-13b --context 4k --kv disk", "disk"),
    ],
)
def test_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_another_machine_needs_no_backend_of_jax():
    command = ["plan", "--shape", "smollm2-135m", "--context", "4k", "--gpu", "h200", "--json"]
    code = f"import sys; from directkv_jax.cli import main; sys.exit(main({command}))"
    got = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "JAX_PLATFORMS": "none_such"},
    )  # fmt: skip
    sizes = json.loads(got.stdout)["sizes"]
    assert sizes["parameters"] == plan.count_parameters(plan.shape("smollm2-135m"))
