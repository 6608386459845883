"""How far the models of tests/data/parity are from transformers: the table of docs/models.md.

    python scripts/parity_table.py

The largest difference of logits in float32, and the root mean square error in bfloat16, ours and
that of transformers, all over the largest logit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))
import test_parity as parity  # noqa: E402

PAGE, MARK = ROOT / "docs" / "models.md", "<!-- parity -->"


def main() -> None:
    """Measures all and writes the page anew."""
    lines = [
        "| checkpoint | float32, largest difference | bfloat16, rms | theirs, rms |",
        "|---|---|---|---|",
    ]
    for folder in parity.FOLDERS:
        tokens, exact, rounded = parity.expected(folder)
        scale = np.abs(exact).max()
        single = np.abs(parity.logits_of(folder, "float32", tokens) - exact).max() / scale
        low = rms(parity.logits_of(folder, "bfloat16", tokens) - exact) / scale
        theirs = rms(rounded - exact) / scale
        lines.append(f"| {folder.name} | {single:.1e} | {low:.1e} | {theirs:.1e} |")
        print(lines[-1], flush=True)
    before, _, after = PAGE.read_text().split(MARK)
    PAGE.write_text(f"{before}{MARK}\n" + "\n".join(lines) + f"\n{MARK}{after}")


def rms(x: np.ndarray) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(x**2)))


if __name__ == "__main__":
    main()
