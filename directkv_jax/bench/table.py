"""Rows of a record as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def lines(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A header and one line for each row; columns that are empty in all rows are left out.

    Args:
      columns: title -> key of the row.
      rows: a row with a text under "error" shows it at the end instead of its figures.
    """
    shown = {
        title: key
        for title, key in columns.items()
        if any(row.get(key) is not None for row in rows)
    }
    cells = [[_cell(row.get(key)) for key in shown.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(shown, *cells, strict=True)]
    out = ["  ".join(title.rjust(width) for title, width in zip(shown, widths, strict=True))]
    for row, line in zip(rows, cells, strict=True):
        text = "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        out.append(f"{text}  {row['error']}" if row.get("error") else text)
    return out


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value != 0 and abs(value) < 0.01:
            return f"{value:.1e}"
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
