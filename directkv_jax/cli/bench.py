"""`directkv bench`: the arguments of its commands. What they run is in `directkv_jax.bench`."""

from __future__ import annotations

import argparse
import importlib

COMMANDS = {
    "attention": "how fast one layer's cache is read, against the link and other implementations",
    "layer": "a layer's attention from its input: projection, RoPE, attention and append",
    "decode": "whole decode steps of a model with random weights and a filled cache",
    "plot": "figures drawn from the records of `attention` and `decode`",
}


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Adds a parser for each command; each sets `run`."""
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK", parser_class=type(parser))
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"directkv_jax.bench.{name}")
        command = commands.add_parser(
            name, help=text, description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(command)
        command.set_defaults(run=module.run)
