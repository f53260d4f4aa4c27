"""Draws docs/architecture.svg from the layers that the import linter checks.

`make docs` writes the picture, and a test holds it fresh (`tests/unit/docs/test_reference.py`).
"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

_ROOT: Final = Path(__file__).parents[1]
FILE: Final = _ROOT / "docs" / "architecture.svg"
_STYLE: Final = """<style>
text { font: 12px system-ui, sans-serif; fill: #57606a } rect { stroke: #8c959f } path { stroke: #d0d7de }
</style>
<rect width="100%" height="100%" style="fill: #ffffff; stroke: none"/>"""
_COLOURS: Final = {
    "serve": "#fff1e5",
    "tools": "#fff1e5",
    "protocol": "#ddf4ff",
    "transport": "#ddf4ff",
    "observe": "#fbefff",
    "sources": "#fff8c5",
    "picker": "#dafbe1",
    "request": "#dafbe1",
}
"""The colour of each room of `epp`. Rooms without a colour are grey."""


def architecture() -> str:
    """Return the layers of `epp`, each with its modules. Imports point downwards."""
    left, top, step, width = 12, 12, 34, 892
    rows: list[str] = []
    y = top
    for layer in layers():
        x, row = left, ""
        for module in layer:
            across = 16 + 7 * len(module)
            if x + across > width - left:
                x, y = left, y + step
            colour = _COLOURS.get(module.partition(".")[0], "#f6f8fa")
            row += f'<rect x="{x}" y="{y}" width="{across}" height="24" rx="5" style="fill: {colour}"/>'
            row += f'<text x="{x + across // 2}" y="{y + 16}" text-anchor="middle">{escape(module)}</text>'
            x += across + 8
        y += step
        rows.append(f'{row}<path d="M{left} {y - 5} H{width - left}"/>')
    return svg(width, y + top, rows)


def svg(width: int, height: int, rows: Sequence[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, *rows, "</svg>\n"))


def layers() -> list[list[str]]:
    """Return the names of the modules of each layer, the highest first, without `epp`."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(each["layers"] for each in contracts if each["name"].startswith("epp layers"))
    return [[part.strip().removeprefix("epp.") for part in re.split(r"[|:]", layer)] for layer in found]


if __name__ == "__main__":
    FILE.write_text(architecture())
