"""Prints what benches measured: tables in Markdown, and JSON for other programs."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

Cell = str | float | int


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that a `share` of all values do not exceed, or nan if there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table that a page can include unchanged."""
    lines = [columns, ["---"] * len(columns), *(list(map(_text, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    print(f"\n{title}\n\n{markdown(columns, rows)}")


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
