"""Draws lines over an axis of numbers as SVG text, for the pages of docs/."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from epp.replay import charts


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def line_chart(title: str, lines: Sequence[Line], *, x_label: str, y_label: str, log_x: bool = False) -> str:
    """With `log_x`, equal distances are equal ratios, so every x must be above zero."""
    xs = [x for line in lines for x, _ in line.points]
    top = charts.ceiling(max(y for line in lines for _, y in line.points))
    first, last = _place(min(xs), log=log_x), _place(max(xs), log=log_x)

    def at(x: float, y: float) -> tuple[float, float]:
        share = (_place(x, log=log_x) - first) / (last - first)
        return charts.LEFT + share * (charts.WIDTH - charts.LEFT - charts.RIGHT), charts.y_at(y / top)

    parts = [
        *charts.frame(title, x_label, y_label),
        *charts.scale(top),
        *charts.legend([line.name for line in lines]),
    ]
    ticks = _ticks(sorted(set(xs)))
    parts += [
        charts.text_at(
            at(x, 0)[0], charts.HEIGHT - charts.BOTTOM + 16, charts.number_text(x), anchor="middle"
        )
        for x in ticks
    ]
    for line, colour in zip(lines, charts.colours(len(lines)), strict=True):
        places = [at(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return charts.whole(parts)


def _place(x: float, *, log: bool) -> float:
    return math.log(x) if log else x


def _ticks(xs: Sequence[float]) -> Sequence[float]:
    """Return the values at which the axis has numbers: at most a dozen."""
    return xs[:: -(-len(xs) // 12)]
