"""Tracked files belong to the project, not to one machine: no absolute paths, nothing big."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_BYTES = 1 << 20

# Written in pieces, so that this file does not contain what it looks for.
_HOMES = "|".join(("root", "work", r"home/\w+", r"Users/\w+"))
PATTERNS = {
    "a path of one machine": re.compile(rf"(?<![\w.:*$)}}/-])/(?:{_HOMES})/"),
    "a file URL": re.compile("file:" + "//"),
    "a merge marker": re.compile(r"^(?:<{7} |>{7} )", re.M),
}


def problems(path: Path) -> list[str]:
    """What is wrong with one tracked file."""
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        return [f"{len(data)} bytes, more than {MAX_BYTES}"]
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return [] if path.suffix in {".png", ".gguf", ".safetensors"} else ["not text"]
    found = []
    for what, pattern in PATTERNS.items():
        for match in pattern.finditer(text):
            found.append(f"line {text.count(chr(10), 0, match.start()) + 1}: {what}")
    return found


def main() -> int:
    """Checks all; exit status 1 if something is wrong."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    found = [f"{path.relative_to(ROOT)}: {text}" for path in paths for text in problems(path)]
    print("\n".join(found) or f"{len(paths)} tracked files, nothing of one machine in them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
