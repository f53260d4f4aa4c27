"""Draws bars in groups as SVG text. Needs no package, keeps no state.

Values start at zero, so that lengths compare as the numbers do. `report` calls this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, _TOP, BOTTOM = 60, 20, 50, 50
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that people with colour blindness can tell apart."""


@dataclass(frozen=True, slots=True)
class Bars:
    """One group: a value for each series. None: there is no value."""

    label: str
    values: Sequence[float | None]


def bar_chart(title: str, series: Sequence[str], groups: Sequence[Bars], *, y_label: str) -> str:
    """Return a bar chart. Each bar has its value above it."""
    top = ceiling(max(value for group in groups for value in group.values if value is not None))
    parts = [*frame(title, "", y_label), *scale(top), *legend(series)]
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    width = min(48.0, 0.8 * room / len(series))
    for number, group in enumerate(groups):
        middle = LEFT + room * (number + 0.5)
        parts.append(text_at(middle, HEIGHT - BOTTOM + 16, group.label, anchor="middle"))
        for place, (value, colour) in enumerate(zip(group.values, colours(len(series)), strict=True)):
            if value is None:
                continue
            x, y = middle + width * (place - len(series) / 2), y_at(value / top)
            height = HEIGHT - BOTTOM - y
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{height:.1f}" fill="{colour}"/>'
            )
            parts.append(text_at(x + width / 2, y - 4, number_text(value), anchor="middle", size=10))
    return whole(parts)


def frame(title: str, x_label: str, y_label: str) -> list[str]:
    across = f"translate(14,{(_TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"
    return [
        text_at(LEFT, 18, title, size=13),
        text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, anchor="middle"),
        f'<text transform="{across}" text-anchor="middle">{escape(y_label)}</text>',
    ]


def scale(top: float) -> list[str]:
    parts = []
    for fifth in range(6):
        y, value = y_at(fifth / 5), top * fifth / 5
        shade = "#444" if fifth == 0 else "#ddd"
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{shade}"/>')
        parts.append(text_at(LEFT - 6, y + 4, number_text(value), anchor="end"))
    return parts


def legend(names: Sequence[str]) -> list[str]:
    parts, x = [], float(LEFT)
    if len(names) == 1 and not names[0]:
        return []
    for name, colour in zip(names, colours(len(names)), strict=True):
        parts.append(f'<rect x="{x:.0f}" y="27" width="10" height="10" fill="{colour}"/>')
        parts.append(text_at(x + 14, 36, name))
        x += 30 + 6.2 * len(name)
    return parts


def text_at(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def whole(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>", ""])


def y_at(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - _TOP - BOTTOM)


def ceiling(value: float) -> float:
    """Return the next of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten: five steps divide these well."""
    if value <= 0:
        raise ValueError("a chart shows at least one value over zero")
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(step * power for step in steps if step * power >= value * 0.9999)


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def colours(count: int) -> Sequence[str]:
    if count > len(_COLOURS):
        raise ValueError(f"a chart has at most {len(_COLOURS)} series, not {count}")
    return _COLOURS[:count]
