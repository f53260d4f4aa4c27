"""Makes reports of runs for people: lines for a terminal, and one HTML page with the same table and the
distributions as curves.

Shows one run, or several side by side with ratios to the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from bench.load.figures import Figures, RunRecord

_COLOURS: Final = ("#8a8f98", "#0b6bcb", "#c2410c", "#15803d")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. `value` returns nan if there is no value to show."""

    name: str
    value: Callable[[Figures], float]
    show: Callable[[float], str]
    ratio: bool = True


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:,.{0 if seconds >= 0.1 else 1}f} ms"


def _count(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:,.0f}"


def _rate(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:,.2f}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _over(a: float, b: float) -> float:
    return a / b if b else math.nan


def _quantiles(title: str, measure: str, shares: Sequence[float]) -> list[Line]:
    def at(share: float) -> Callable[[Figures], float]:
        return lambda figures: figures.measures[measure].quantile(share)

    mean = Line(f"{title} mean", lambda figures: figures.measures[measure].mean, _ms)
    return [mean, *(Line(f"{title} p{share * 100:g}", at(share), _ms) for share in shares)]


LINES: Final[Sequence[Line]] = (
    Line("requests", lambda f: f.asked, _count, ratio=False),
    Line("answered", lambda f: f.answered, _count, ratio=False),
    Line("failed", lambda f: f.failed, _count, ratio=False),
    Line("not finished", lambda f: f.unfinished, _count, ratio=False),
    Line("answers/s", lambda f: _over(f.answered, f.duration_s), _rate),
    Line("output tokens/s, all together", lambda f: _over(f.output_tokens, f.duration_s), _count),
    Line("output tokens/s of one answer, p50", lambda f: f.measures["tokens_per_s"].quantile(0.5), _rate),
    *_quantiles("TTFT", "ttft_s", (0.5, 0.9, 0.99)),
    *_quantiles("inter-token", "inter_token_s", (0.5, 0.9)),
    *_quantiles("longest gap in an answer", "longest_gap_s", (0.9,)),
    *_quantiles("whole answer", "answer_s", (0.5, 0.9)),
    Line("prompt tokens", lambda f: f.prompt_tokens, _count),
    Line("prompt tokens from cache", lambda f: _over(f.cached_tokens, f.prompt_tokens), _percent),
)


def cells(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return the table: a heading, then a row for each line. With two or more runs, each run except the first
    has a ratio.
    """
    rows = [["", *(run.label for run in runs), *(f"{run.label} / {runs[0].label}" for run in runs[1:])]]
    for line in LINES:
        values = [float(line.value(run.figures)) for run in runs]
        ratios = [_over(value, values[0]) if line.ratio else math.nan for value in values[1:]]
        rows.append(
            [line.name, *map(line.show, values), *("" if math.isnan(r) else f"{r:.2f}x" for r in ratios)]
        )
    return rows


def text(runs: Sequence[RunRecord]) -> str:
    """Return the report for a terminal: the table, failures by class, and the generator's verdict on
    itself.
    """
    rows = cells(runs)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (
            cell.ljust(w) if n == 0 else cell.rjust(w)
            for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(["", first, *rest]).rstrip())
    for run in runs:
        lines += [
            "",
            f"{run.label}:",
            *_indented(failure_lines(run.figures)),
            *_indented(generator_lines(run.figures)),
        ]
    return "\n".join(lines)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def failure_lines(figures: Figures) -> list[str]:
    found = []
    for kind, count in sorted(figures.failures.items()):
        example = figures.examples.get(kind, [kind])[0]
        found.append(f"{count} failed by class '{kind}', such as: {example}")
    if figures.uncounted:
        found.append(f"{figures.uncounted} answers came without usage: their tokens are counted as events")
    return found


def generator_lines(figures: Figures) -> list[str]:
    """Return the lines that say whether the generator was a bottleneck."""
    if figures.verdict:
        head = "THE GENERATOR WAS A BOTTLENECK: these figures are not the servers' alone."
        return [head, *(f"  - {reason}" for reason in figures.verdict), f"  ({figures.health.summary()})"]
    return [f"The generator kept up: {figures.health.summary()}."]


# -- the page ------------------------------------------------------------------------------------------------

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2328;max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}.about{color:#59636e;margin:0 0 1rem}
.table{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #d8dee4;white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{background:#f6f8fa}
.note{border-left:4px solid #1a7f37;background:#f0fbf3;padding:.5rem .9rem;margin:.6rem 0;white-space:pre-wrap}
.note.bad{border-color:#cf222e;background:#fff1f0}
.curves{display:flex;flex-wrap:wrap;gap:1rem}svg{max-width:100%}
"""


def page(runs: Sequence[RunRecord], *, title: str, links: Sequence[tuple[str, str]] = ()) -> str:
    """Return one HTML document that needs no other file. `links` are pairs (text, address) of other files of
    the run.
    """
    head, *rows = cells(runs)
    table = "".join(_html_row(row, "td") for row in rows)
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f"<h1>{escape(title)}</h1>",
        f'<p class="about">{escape(_about(runs))}</p>',
        *(_note(run, several=len(runs) > 1) for run in runs),
        f'<div class="table"><table>{_html_row(head, "th")}{table}</table></div>',
        *_failures(runs),
        "<h2>Distributions</h2>",
        '<div class="curves">',
        curves(runs, "ttft_s", "time to first token"),
        curves(runs, "inter_token_s", "time from token to token, mean of each answer"),
        curves(runs, "answer_s", "whole answer"),
        "</div>",
    ]
    if links:
        items = " · ".join(f'<a href="{escape(address)}">{escape(name)}</a>' for name, address in links)
        parts.append(f"<p>{items}</p>")
    return "\n".join(parts) + "\n"


def _html_row(row: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"


def _about(runs: Sequence[RunRecord]) -> str:
    settings = runs[0].settings
    duration = " and ".join(f"{run.figures.duration_s:.0f} s" for run in runs)
    stated = ", ".join(f"{name} {value}" for name, value in settings.items() if value not in ("", None))
    return f"{duration}; {stated}"


def _note(run: RunRecord, *, several: bool) -> str:
    lines = generator_lines(run.figures)
    if several:
        lines = [f"{run.label}: {lines[0]}", *lines[1:]]
    bad = " bad" if run.figures.verdict else ""
    return f'<div class="note{bad}">{escape(chr(10).join(lines))}</div>'


def _failures(runs: Sequence[RunRecord]) -> list[str]:
    rows = [
        [run.label, kind, f"{count:,}", " | ".join(run.figures.examples.get(kind, []))]
        for run in runs
        for kind, count in sorted(run.figures.failures.items())
    ]
    if not rows:
        return []
    head = _html_row(["run", "class", "requests", "such as"], "th")
    body = "".join(_html_row(row, "td") for row in rows)
    return ["<h2>Failures</h2>", f'<div class="table"><table>{head}{body}</table></div>']


_WIDTH: Final = 470
_HEIGHT: Final = 250
_LEFT: Final = 44
_BOTTOM: Final = 40
_TOP: Final = 34


def curves(runs: Sequence[RunRecord], measure: str, title: str) -> str:
    """Return the share of answers (vertical) within a time (horizontal, logarithmic), with a curve for each
    run.
    """
    sampled = [run.figures.measures[measure] for run in runs]
    ends = [max(1e-4, end) for samples in sampled if samples.count for end in (samples.least, samples.most)]
    if not ends:
        return ""
    low, high = math.log10(min(ends)), math.log10(max(ends) * 1.05)
    span = max(high - low, 0.1)

    def x(seconds: float) -> float:
        return _LEFT + (math.log10(max(seconds, 1e-4)) - low) / span * (_WIDTH - _LEFT - 12)

    def y(share: float) -> float:
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" font-family="system-ui,sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="14" font-size="13" font-weight="600">{escape(title)}</text>',
        *_grid(x, y, low, high),
    ]
    for number, (run, samples) in enumerate(zip(runs, sampled, strict=True)):
        colour = _COLOURS[(number + (len(runs) == 1)) % len(_COLOURS)]
        points = [(samples.least, 0.0), *samples.curve()] if samples.count else []
        steps = " ".join(f"{x(value):.1f},{y(share):.1f}" for value, share in points)
        parts.append(f'<polyline points="{steps}" fill="none" stroke="{colour}" stroke-width="2"/>')
        where = _LEFT + 130 * number
        parts.append(f'<rect x="{where}" y="20" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{where + 18}" y="27">{escape(run.label)}</text>')
    return "\n".join([*parts, "</svg>"])


def _grid(x: Callable[[float], float], y: Callable[[float], float], low: float, high: float) -> list[str]:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#e5e9ed"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end" fill="#59636e">{share:.0%}</text>'
        )
    for seconds in _marks(10**low, 10**high):
        at, bottom = f"{x(seconds):.1f}", _HEIGHT - _BOTTOM
        name = f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
        parts.append(f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}" stroke="#e5e9ed"/>')
        parts.append(f'<text x="{at}" y="{bottom + 16}" text-anchor="middle" fill="#59636e">{name}</text>')
    return parts


def _marks(least: float, most: float) -> list[float]:
    """Return round numbers between both limits: 1, 2, 5 of each power of ten, or even steps if these numbers
    would be too few.
    """
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    wide = most / least > 300
    found = [mark * 10.0**power for power in powers for mark in ((1,) if wide else (1, 2, 5))]
    if most / least < 8:
        rough = (most - least) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * mark for mark in (1, 2, 5, 10) if power * mark >= rough)
        found = [round(step * n, 9) for n in range(math.ceil(least / step), math.floor(most / step) + 1)]
    return [mark for mark in found if least <= mark <= most]
