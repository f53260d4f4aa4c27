"""Prints the results of the model server's benchmarks: a table, and JSON for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Cell = str | float | int


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table in Markdown, so that a page can include it unchanged."""
    print(f"\n{title}\n")
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        print("| " + " | ".join(_text(cell) for cell in row) + " |")


def write_json(path: Path | None, content: object) -> None:
    """Write the file by rename. A run that is cut off while it writes then leaves the old file."""
    if path is not None:
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(path)


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 10 else f"{cell:,.1f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
