"""The figures of several policies side by side: as a table of text, and as a picture (SVG). Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from epp.tools.replay.charts import HEIGHT, Bars, bar_chart
from epp.tools.replay.trace import Figures

RECORDED: Final = "as recorded"
_MOST_SERVERS: Final = 12
"""With more servers, the table has only sums of them, and the picture leaves them out."""
_ROWS: Final[Sequence[tuple[str, Callable[[Figures], str]]]] = (
    ("token hit rate", lambda f: f"{f.hit_ratio:.1%}"),
    ("TTFT mean", lambda f: _ms(f.ttft_mean_s)),
    ("TTFT p50", lambda f: _ms(f.ttft_p50_s)),
    ("TTFT p90", lambda f: _ms(f.ttft_p90_s)),
    ("TTFT p99", lambda f: _ms(f.ttft_p99_s)),
    ("TPOT p50", lambda f: _ms(f.tpot_p50_s, digits=1)),
    ("TPOT p90", lambda f: _ms(f.tpot_p90_s, digits=1)),
    ("requests counted", lambda f: f"{f.counted:,}"),
    ("failed or unfinished", lambda f: f"{f.failed:,}"),
    ("busiest / mean server", lambda f: f"{imbalance(f):.2f}"),
)


def table(columns: Mapping[str, Figures]) -> str:
    """Return one column for each policy, one row for each figure. A small number of servers have their own
    rows.
    """
    rows = [["", *columns]]
    rows += [[label, *(show(figures) for figures in columns.values())] for label, show in _ROWS]
    servers = _servers(columns)
    if len(servers) <= _MOST_SERVERS:
        rows += [
            [f"requests to {server}", *(f"{f.by_server.get(server, 0):,}" for f in columns.values())]
            for server in servers
        ]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def picture(columns: Mapping[str, Figures], *, title: str) -> str:
    """Return bars of hit rate, TTFT, TPOT and requests by server, one chart below the other."""
    names = list(columns)
    every = list(columns.values())
    charts = [
        bar_chart(title, names, [Bars("", [100 * f.hit_ratio for f in every])], y_label="token hit rate, %"),
        bar_chart(
            "Time to first token",
            names,
            [
                Bars("p50", [_in_ms(f.ttft_p50_s) for f in every]),
                Bars("p90", [_in_ms(f.ttft_p90_s) for f in every]),
                Bars("p99", [_in_ms(f.ttft_p99_s) for f in every]),
            ],
            y_label="ms",
        ),
        bar_chart(
            "Time for each further token",
            names,
            [
                Bars("p50", [_in_ms(f.tpot_p50_s) for f in every]),
                Bars("p90", [_in_ms(f.tpot_p90_s) for f in every]),
            ],
            y_label="ms",
        ),
    ]
    servers = _servers(columns)
    if len(servers) <= _MOST_SERVERS:
        groups = [Bars(server, [float(f.by_server.get(server, 0)) for f in every]) for server in servers]
        charts.append(bar_chart("Requests by server", names, groups, y_label="requests"))
    return _stacked(charts)


def imbalance(figures: Figures) -> float:
    """Return the requests of the busiest server divided by the mean."""
    counts = list(figures.by_server.values())
    return max(counts) * len(counts) / sum(counts) if counts and sum(counts) else 0.0


def _servers(columns: Mapping[str, Figures]) -> list[str]:
    return list(dict.fromkeys(server for figures in columns.values() for server in figures.by_server))


def _stacked(charts: Sequence[str]) -> str:
    opening = re.match(r"<svg[^>]*>", charts[0])
    assert opening is not None
    head = opening.group().replace(f'height="{HEIGHT}"', f'height="{HEIGHT * len(charts)}"')
    inner = [
        f'<g transform="translate(0,{HEIGHT * n})">{chart[opening.end() :].strip().removesuffix("</svg>")}</g>'
        for n, chart in enumerate(charts)
    ]
    return "\n".join([head, *inner, "</svg>", ""])


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _ms(seconds: float | None, *, digits: int = 0) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.{digits}f} ms"
