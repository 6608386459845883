import dataclasses
import json

import pytest
import tokenizers

from directkv_jax.models import Tokenizer, load

TEXTS = ("hello, 1234 worlds", "Ünïcödé — 漢字 🙂👍🏽", "  two  spaces\n\tand a tab", "")
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole(text, loaded):
    tokenizer = loaded[1]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(token) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + decoder.flush() == text


def test_an_incomplete_character_is_held_back(loaded):
    tokenizer = loaded[1]
    ids = tokenizer.encode("a🙂")
    decoder = tokenizer.stream_decoder()
    assert [decoder.push(token) for token in ids[:-1]] == ["a", "", "", ""]
    assert decoder.flush() == tokenizer.decode(ids[:-1])[1:] != ""
    assert decoder.push(tokenizer.encode("b")[0]) == "b"


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_and_folder_agree(text, tiny, tmp_path, loaded):
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.config, tiny.weights)
    other = load(path, "float32", progress=False)[1]
    assert other.encode(text) == loaded[1].encode(text)
    chat = other.apply_chat_template(MESSAGES)
    assert other.encode_chat(MESSAGES) == loaded[1].encode_chat(MESSAGES)
    assert chat == "<|start|>user: hello<|end|><|start|>"
    assert other.decode(other.encode_chat(MESSAGES)) == "user: hello"


def test_gguf_may_ask_for_a_first_token(tiny, tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, tiny.config, tiny.weights, metadata={"tokenizer.ggml.add_bos_token": 1})
    tokenizer = load(path, "float32", progress=False)[1]
    assert tokenizer.encode("he")[0] == 270
    assert tokenizer.encode("he", add_special_tokens=False)[0] != 270
    assert tokenizer.encode_chat(MESSAGES).count(270) == 2  # those of the template alone


def test_where_templates_and_ends_are_found(tiny, tmp_path):
    named = [{"name": "default", "template": "A"}, {"name": "tools", "template": "B"}]
    folder = tmp_path / "m"
    tiny.write_folder(folder, tiny.config, tiny.weights, chat_template=named)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    tokenizer = load(folder, "float32", progress=False)[1]
    assert tokenizer.apply_chat_template(MESSAGES) == "A"
    assert tokenizer.eos_ids == (1, 2)
    (folder / "chat_template.jinja").write_text("C {{ eos_token }}")
    assert load(folder, progress=False)[1].apply_chat_template(MESSAGES) == "C <|end|>"


def test_templates_have_what_transformers_gives_them(loaded):
    template = (
        "{{ strftime_now('%Y') | int > 2000 }}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    text = with_template(loaded[1], template).apply_chat_template(MESSAGES)
    assert text == "True" + "".join(message["content"] for message in MESSAGES)
    odd = [{"role": "tool", "content": "3 < 5 & it's é"}]
    template = (
        "{% if tools is none and documents is none %}{{ messages[0].content | tojson }}{% endif %}"
    )
    assert with_template(loaded[1], template).apply_chat_template(odd) == '"3 < 5 & it\'s é"'
    template = "{{ messages | tojson(indent=1) }}"
    assert with_template(loaded[1], template).apply_chat_template(odd) == (
        '[\n {\n  "role": "tool",\n  "content": "3 < 5 & it\'s é"\n }\n]'
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "`messages` should be a list of messages, but got 'hello'"),
        (MESSAGES[0], "`messages` should be a list of messages"),
        (["hello"], "each of `messages` should be a dict of `role` and `content`"),
        ([{"content": "hello"}], "each of `messages` should be a dict of `role` and `content`"),
        ([{"role": "user", "content": [{"type": "text"}]}], "`content` should be text, but is"),
    ],
)
def test_what_is_no_chat(messages, message, loaded):
    with pytest.raises(TypeError, match=message):
        loaded[1].encode_chat(messages)


def with_template(tokenizer: Tokenizer, template):
    return dataclasses.replace(tokenizer, chat_template=template)


def test_no_template(loaded):
    with pytest.raises(ValueError, match=r"has no chat template.*plain text"):
        with_template(loaded[1], None).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # the way out of a plain environment
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system role') }}",
        "{% for %}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 / 0 }}",
        "{{ '{}'.format() }}",
        "{{ '%(a)s' % {} }}",
        "{{ 'abc' | truncate(1) }}",
        "{{ 'a'.index('b') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_templates_run_in_a_sandbox(template, loaded):
    with pytest.raises(ValueError, match="the chat template could not be rendered"):
        with_template(loaded[1], template).apply_chat_template(MESSAGES)


def test_a_text_that_has_no_tokens():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text"):
        Tokenizer(backend).encode("b")
    with pytest.raises(TypeError, match="`text` should be a str"):
        Tokenizer(backend).encode(b"a")
