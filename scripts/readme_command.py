"""Prints a command of README.md, so that CI runs what the reader is told to run.

`python scripts/readme_command.py NAME` prints the fenced block of shell whose first line is
`# readme: NAME`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def commands(text: str) -> dict[str, str]:
    """Every marked command by name."""
    fence = r"^```sh\n# readme: (\w+)\n(.*?)\n```$"
    return dict(re.findall(fence, text, re.S | re.M))


def main() -> int:
    """Prints one command; exit status 1 if there is none of that name."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = commands(README.read_text())
    if sys.argv[1] not in found:
        print(
            f"README.md should have a block of sh that begins with `# readme: {sys.argv[1]}`, but "
            f"has only {sorted(found)}.",
            file=sys.stderr,
        )
        return 1
    print(found[sys.argv[1]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
