"""A Griffe extension: the literal blocks of docstrings, `::` and an indented text, as Markdown."""

from __future__ import annotations

import logging
import re
import textwrap

import griffe

LOG = logging.getLogger("mkdocs.plugins.literal_blocks")
# A line that ends with `::`, an empty one, and what is indented deeper, with empty lines between.
BLOCK = re.compile(
    r"^(?P<indent> *)(?P<text>\S.*):: *\n\n(?P<block>(?:(?P=indent) +\S.*(?:\n|\Z)|\n)+)", re.M
)


def fenced(docstring: str) -> str:
    """`docstring` with its literal blocks in fences, as code of Python."""

    def fence(found: re.Match) -> str:
        indent, text = found["indent"], found["text"]
        code = textwrap.dedent(found["block"]).strip("\n")
        lines = [f"{text}:", "", "```python", *code.split("\n"), "```", "", ""]
        return "\n".join(indent + line if line else "" for line in lines)

    return BLOCK.sub(fence, docstring)


class LiteralBlocks(griffe.Extension):
    """Rewrites the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Called for modules, classes, functions and attributes."""
        if obj.docstring is None:
            return
        obj.docstring.value = fenced(obj.docstring.value)
        if re.search("::$", obj.docstring.value, re.M):
            LOG.warning("%s: `::` should be followed by an indented block", obj.path)
