import io
import json

import pytest

from directkv_jax.cli import main


@pytest.fixture
def say(folder, monkeypatch, capsys):
    """Lines of input -> (exit status, records of the answers, stderr)."""

    def call(*lines, options=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        arguments = ["chat", "--model", str(folder), "--max-new-tokens", "4", "--json"]
        if "--resume" not in options:
            arguments += ["--kv", "device", "--page-size", "16", "--max-length", "256"]
        status = main([*arguments, *options])
        captured = capsys.readouterr()
        records = [json.loads(x) for x in captured.out.splitlines() if x.startswith('{"text"')]
        return status, records, captured.err

    return call


def test_a_chat_goes_on_and_is_resumed(say, tmp_path):
    status, (first, second), err = say(
        "hello", "", "and you?", f"/save \t{tmp_path / 'chat'}", "/help"
    )
    assert status == 0
    assert (first["cached_tokens"], first["kv_bytes_host"]) == (0, 0)
    assert 0 < second["cached_tokens"] < second["prompt_tokens"]
    assert f"{second['cached_tokens']} of {second['prompt_tokens']} prompt tokens cached" in err
    assert "/save FILE" in err
    status, (third,), _ = say("more", options=("--resume", str(tmp_path / "chat")))
    assert status == 0
    assert third["cached_tokens"] > second["cached_tokens"]
    assert third["kv_bytes_host"] == 0
    _, (moved,), _ = say("more", options=("--resume", str(tmp_path / "chat"), "--kv", "host"))
    assert moved["text"] == third["text"]
    assert moved["kv_bytes_host"] == third["kv_bytes_device"]
    # As if it had not been interrupted.
    _, (*_, uninterrupted), _ = say("hello", "and you?", "more")
    assert third["text"] == uninterrupted["text"]


def test_new_forgets_all_but_the_system_message(say):
    _, answers, _ = say("hello", "/new", "hello", "/new", "bye", options=("--system", "be kind"))
    assert answers[0]["text"] == answers[1]["text"]
    # What the turns have in common is not read again: the system message.
    assert 0 < answers[2]["cached_tokens"] < answers[2]["prompt_tokens"]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (("/load x",), (), "there is no command /load. /help lists them; a message that begins so"),
        (("/",), (), "there is no command /."),
        (("/save",), (), "/save needs the name of a file"),
        (("hi",), ("--max-length", "0"), "`max_length` should be a positive int"),
        (("hi",), ("--resume", "chat", "--page-size", "16"), "--page-size belongs to the begin"),
        (("x" * 600,), (), "but the cache holds 256"),
        (("hi",), ("--resume", "chat", "--system", "x"), "--system belongs to the beginning"),
        (("hi",), ("--resume", "no such file"), "does not exist"),
    ],
)
def test_bad_input(say, lines, options, message):
    status, records, err = say(*lines, options=options)
    assert (status, records) == (2, [])
    assert message in err


def test_a_message_may_begin_with_a_slash(say):
    status, answers, _ = say("/etc/hosts is what?", " /save what?")
    assert (status, len(answers)) == (0, 2)


def test_input_that_is_no_text(monkeypatch, capsys, folder):
    source = io.TextIOWrapper(io.BytesIO(b"hello\n\xff\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", source)
    assert main(["chat", "--model", str(folder), "--max-length", "64"]) == 2
    assert "the standard input should be utf-8 text" in capsys.readouterr().err
