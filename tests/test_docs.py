"""What the documentation says can be done can be done, and what it quotes is in the sources."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import re

import pages
import pytest

import directkv_jax
import directkv_jax.linen
import directkv_jax.models
import directkv_jax.models.plan
import directkv_jax.nnx
from directkv_jax.cli import build_parser

DOCS = sorted((pages.ROOT / "docs").glob("*.md"))
# The last one is run by tests/models/test_checkpoints_page.py, which has a model for it.
WITH_PYTHON = ["jit", "flax", "checkpoints"]


def page(name):
    return pages.ROOT / "docs" / f"{name}.md"


@pytest.mark.parametrize("name", WITH_PYTHON[:2])
def test_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.run(page(name))


def test_no_page_with_python_is_left_out():
    assert {path.stem for path in DOCS if pages.blocks(path, "python")} == set(WITH_PYTHON)


COMMANDS = [
    pytest.param(call, id=f"{path.stem}-{index}")
    for path in [*DOCS, pages.ROOT / "README.md"]
    for index, call in enumerate(pages.commands(path, "directkv"))
]


@pytest.mark.parametrize("call", COMMANDS)
def test_command_is_understood(call, capsys):
    try:
        build_parser().parse_args(call)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


def test_there_are_commands():
    assert len(COMMANDS) > 8


def options(parser):
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options(command)


# performance.md names options of the scripts in benchmarks/ too.
@pytest.mark.parametrize("name", ["checkpoints", "troubleshooting"])
def test_options_named_in_the_text_exist(name):
    named = set(re.findall(r"`(--[a-z-]+)[^`]*`", page(name).read_text()))
    assert named
    assert named <= set(options(build_parser()))


def templates_of_python(path):
    """The strings of a module, with `...` where a value is put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            )
            yield "".join(map(str, parts))


def templates_of_cpp(path):
    """The same of C++, where a message is a sum of literals and values."""
    text, last = path.read_text(), None
    message = ""
    for literal in re.finditer(r'"((?:[^"\\\n]|\\.)*)"', text):
        between = "" if last is None else text[last.end() : literal.start()]
        if not between.strip():
            message += literal[1]
        elif re.fullmatch(r"\s*\+[^;{}]*\+\s*", between):
            message += f"...{literal[1]}"
        else:
            yield message
            message = literal[1]
        last = literal
    yield message


@functools.cache
def templates():
    python = [
        path for name in ("directkv_jax", "models") for path in (pages.ROOT / name).rglob("*.py")
    ]
    cpp = [path for name in ("csrc", "ffi") for path in (pages.ROOT / name).rglob("*.[ch]*")]
    found = [text for path in python for text in templates_of_python(path)]
    return found + [text for path in cpp for text in templates_of_cpp(path)]


QUOTED = [
    (block.line + number, line.strip())
    for block in pages.blocks(page("troubleshooting"), "text")
    for number, line in enumerate(block.text.splitlines())
]


@pytest.mark.parametrize(("line", "quote"), QUOTED, ids=[str(line) for line, _ in QUOTED])
def test_quoted_message_is_in_the_sources(line, quote):
    # What C++ handlers say begins with the name of the library, put before it in one place.
    quote = quote.removeprefix("directkv: ")
    assert any(quote in text for text in templates()), (
        f"docs/troubleshooting.md:{line} quotes what no source says: {quote}"
    )


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_messages_named_at_the_end_of_a_page_are_in_the_sources(name):
    _, end = page(name).read_text().split("## When it fails\n")
    # What stands before the colon of an item; names alone have no space in them.
    heads = [item.split(": ")[0] for item in " ".join(end.split()).split("- `")[1:]]
    quotes = [text for head in heads for text in f"`{head}".split("`")[1::2] if " " in text]
    assert quotes
    for quote in quotes:
        assert any(quote in text for text in templates()), f"no source says: {quote}"


def test_messages_are_quoted():
    assert len(QUOTED) > 12
    assert not any("nothing says this" in text for text in templates())


def named(path):
    """What stands at a dotted path; of a module and a function of one name, the module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    "module",
    [
        directkv_jax,
        directkv_jax.nnx,
        directkv_jax.linen,
        directkv_jax.models,
        directkv_jax.models.plan,
    ],
    ids=lambda module: module.__name__,
)
def test_public_names_are_in_the_reference(module):
    paths = [name for path in DOCS for name in re.findall(r"^::: (\S+)$", path.read_text(), re.M)]
    listed = [named(path) for path in paths]
    if module not in listed:  # one line would stand for all that it exports
        names = [name for name in module.__all__ if not name.startswith("_")]
        assert not [
            name for name in names if not any(getattr(module, name) is found for found in listed)
        ]
