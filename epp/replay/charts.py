"""Draws figures as SVG text: lines over an axis of numbers, and bars in groups. Needs no package, keeps no
state.

Callers: `report`, and benchmarks for the pages of docs/. Values start at zero, so that lengths compare as the
numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 50, 50
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that people with colour blindness can tell apart."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One group: a value for each series. None: there is no value."""

    label: str
    values: Sequence[float | None]


def line_chart(title: str, lines: Sequence[Line], *, x_label: str, y_label: str, log_x: bool = False) -> str:
    """log_x: equal distances are equal ratios, so every x is above zero."""
    xs = [x for line in lines for x, _ in line.points]
    top = _ceiling(max(y for line in lines for _, y in line.points))
    first, last = _place(min(xs), log=log_x), _place(max(xs), log=log_x)

    def at(x: float, y: float) -> tuple[float, float]:
        share = (_place(x, log=log_x) - first) / (last - first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT), _y(y / top)

    parts = [*_frame(title, x_label, y_label), *_scale(top), *_legend([line.name for line in lines])]
    ticks = _ticks(sorted(set(xs)))
    parts += [_text(at(x, 0)[0], HEIGHT - _BOTTOM + 16, _number(x), anchor="middle") for x in ticks]
    for line, colour in zip(lines, _colours(len(lines)), strict=True):
        places = [at(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return _whole(parts)


def bar_chart(title: str, series: Sequence[str], groups: Sequence[Bars], *, y_label: str) -> str:
    """Return a bar chart. Each bar has its value above it."""
    top = _ceiling(max(value for group in groups for value in group.values if value is not None))
    parts = [*_frame(title, "", y_label), *_scale(top), *_legend(series)]
    room = (_WIDTH - _LEFT - _RIGHT) / len(groups)
    width = min(48.0, 0.8 * room / len(series))
    for number, group in enumerate(groups):
        middle = _LEFT + room * (number + 0.5)
        parts.append(_text(middle, HEIGHT - _BOTTOM + 16, group.label, anchor="middle"))
        for place, (value, colour) in enumerate(zip(group.values, _colours(len(series)), strict=True)):
            if value is None:
                continue
            x, y = middle + width * (place - len(series) / 2), _y(value / top)
            height = HEIGHT - _BOTTOM - y
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{height:.1f}" fill="{colour}"/>'
            )
            parts.append(_text(x + width / 2, y - 4, _number(value), anchor="middle", size=10))
    return _whole(parts)


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    across = f"translate(14,{(_TOP + HEIGHT - _BOTTOM) / 2:.0f}) rotate(-90)"
    return [
        _text(_LEFT, 18, title, size=13),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, HEIGHT - 10, x_label, anchor="middle"),
        f'<text transform="{across}" text-anchor="middle">{escape(y_label)}</text>',
    ]


def _scale(top: float) -> list[str]:
    parts = []
    for fifth in range(6):
        y, value = _y(fifth / 5), top * fifth / 5
        shade = "#444" if fifth == 0 else "#ddd"
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{shade}"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(value), anchor="end"))
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], float(_LEFT)
    if len(names) == 1 and not names[0]:
        return []
    for name, colour in zip(names, _colours(len(names)), strict=True):
        parts.append(f'<rect x="{x:.0f}" y="27" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, 36, name))
        x += 30 + 6.2 * len(name)
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _whole(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>", ""])


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _place(x: float, *, log: bool) -> float:
    return math.log(x) if log else x


def _ceiling(value: float) -> float:
    """Return the next of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten: five steps divide these well."""
    if value <= 0:
        raise ValueError("a chart shows at least one value over zero")
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(step * power for step in steps if step * power >= value * 0.9999)


def _ticks(xs: Sequence[float]) -> Sequence[float]:
    """Return the values at which the axis has numbers: at most a dozen."""
    return xs[:: -(-len(xs) // 12)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _colours(count: int) -> Sequence[str]:
    if count > len(_COLOURS):
        raise ValueError(f"a chart has at most {len(_COLOURS)} series, not {count}")
    return _COLOURS[:count]
