"""The fenced blocks of a Markdown page: its Python is run, its commands are taken apart."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of `page`, whose text begins at `line`."""

    page: Path
    language: str
    line: int
    text: str

    def run(self, names: dict) -> dict:
        """Executes it with and into `names`; errors name the page and its line."""
        exec(compile("\n" * (self.line - 1) + self.text, str(self.page), "exec"), names)
        return names


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of one language, in order."""
    text = page.read_text()
    found = [
        Block(page, match[1], text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in FENCE.finditer(text)
    ]
    return [block for block in found if block.language == language]


def run(page: Path) -> dict:
    """Runs all the Python of a page, block after block, in the same namespace."""
    names: dict = {}
    for block in blocks(page, "python"):
        block.run(names)
    return names


def commands(page: Path, program: str) -> list[list[str]]:
    """The arguments of every call of `program` in the shell blocks of a page."""
    found = []
    for block in blocks(page, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            call: list[str] = []
            for token in [*lexer, ";"]:
                if token not in ("&&", "||", "|", ";", ">", "<"):
                    call.append(token)
                    continue
                if call and Path(call[0]).name == program:
                    found.append(call[1:])
                call = []
    return found
