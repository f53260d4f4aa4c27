"""Draws the pictures of the pages as SVG text: `how-it-works.svg` from docs/how-it-works.txt, and
`architecture.svg` from the layers that the import linter checks.

`make docs` writes the pictures, and a test holds them fresh (`tests/unit/docs/test_drawings.py`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

_ROOT: Final = Path(__file__).parents[1]
_DOCS: Final = _ROOT / "docs"
_STYLE: Final = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.name { font-weight: 600 } .small { font-size: 12px; fill: #57606a }
rect { fill: #f6f8fa; stroke: #8c959f } .ours { fill: #ddf4ff; stroke: #0969da }
.bar { fill: #ffffff } .full { fill: #7ee2a8; stroke: none }
path { fill: none; stroke: #57606a; stroke-width: 1.5 } .answer { stroke: #1a7f37 }
.news { stroke-dasharray: 4 4 }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<polygon points="0,0 8,4 0,8" fill="#57606a"/></marker></defs>"""
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


def how_it_works() -> str:
    """Return the picture that docs/how-it-works.txt describes."""
    width = height = 0
    parts: list[str] = []
    for line in (_DOCS / "how-it-works.txt").read_text().splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "size":
            width, height = (int(word) for word in rest.split())
        elif kind in _SHAPES:
            parts += _SHAPES[kind](rest)
    return _whole(width, height, parts)


def _box(line: str) -> Iterator[str]:
    _, x, y, width, height, kind, text = line.split(" ", 6)
    left, top, across, down = int(x), int(y), int(width), int(height)
    yield _rect(left, top, across, down, kind)
    name, *more = text.split(" / ")
    first = top + 24 if down > 90 or more else top + down // 2
    yield _text(left + across // 2, first, name, kind="name")
    for number, each in enumerate(more, 1):
        yield _text(left + across // 2, first + 22 * number, each, kind="small")


def _bar(line: str) -> Iterator[str]:
    x, y, width, share, text = line.split(" ", 4)
    left, top, across = int(x), int(y), int(width)
    yield _rect(left, top, across, 16, "bar")
    yield _rect(left, top, round(across * float(share)), 16, "full")
    yield _text(left + across // 2, top + 38, text, kind="small")


def _arrow(line: str) -> Iterator[str]:
    kind, start, end, text = [*line.split(" ", 3), ""][:4]
    (x, y), (to_x, to_y) = ([int(each) for each in point.split(",")] for point in (start, end))
    yield f'<path class="{kind}" d="M{x} {y} L{to_x} {to_y}" marker-end="url(#tip)"/>'
    if text and x == to_x:
        beside, anchor = (x - 6, "end") if to_y > y else (x + 6, "start")
        yield _text(beside, (y + to_y) // 2 + 4, text, kind="small", anchor=anchor)
    elif text:
        yield _text((x + to_x) // 2, (y + to_y) // 2 - 8, text, kind="small")


def _label(line: str) -> Iterator[str]:
    x, y, text = line.split(" ", 2)
    yield _text(int(x), int(y), text, kind="small")


_SHAPES: Final[Mapping[str, Callable[[str], Iterator[str]]]] = {
    "box": _box,
    "bar": _bar,
    "arrow": _arrow,
    "label": _label,
}


def architecture() -> str:
    """Return the layers of `epp`, each with its modules. Imports point downwards."""
    left, top, step = 12, 12, 34
    parts: list[str] = []
    y = top
    for layer in _layers():
        x, row = left, ""
        for module in layer:
            across = 16 + 7 * len(module)
            if x + across > 880:
                x, y = left, y + step
            colour = _COLOURS.get(module.partition(".")[0], "#f6f8fa")
            row += f'<rect x="{x}" y="{y}" width="{across}" height="24" rx="5" style="fill: {colour}"/>'
            row += _text(x + across // 2, y + 16, module, kind="small")
            x += across + 8
        y += step
        parts.append(f'{row}<path d="M{left} {y - 5} H880" style="stroke: #d0d7de; stroke-width: 1"/>')
    return _whole(892, y + top, parts)


def _layers() -> list[list[str]]:
    """Return the names of the modules of each layer, without `epp`."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["name"].startswith("epp layers"))
    return [[part.strip().removeprefix("epp.") for part in re.split(r"[|:]", layer)] for layer in layers]


def _rect(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def _text(x: int, y: int, text: str, *, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _whole(width: int, height: int, parts: list[str]) -> str:
    inside = "\n".join(parts)
    ground = '<rect width="100%" height="100%" style="fill: #ffffff; stroke: none"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n{_STYLE}\n{ground}\n{inside}\n</svg>\n'
    )


PICTURES: Final[Mapping[Path, Callable[[], str]]] = {
    _DOCS / "how-it-works.svg": how_it_works,
    _DOCS / "architecture.svg": architecture,
}
"""Each file, and the function that draws it."""


def main() -> None:
    for file, draw in PICTURES.items():
        file.write_text(draw())


if __name__ == "__main__":
    main()
