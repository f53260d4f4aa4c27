"""The figures of several policies side by side, as a table of text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from epp.tools.replay.trace import Figures

RECORDED: Final = "as recorded"
_MOST_SERVERS: Final = 12
"""With more servers, the table has only sums of them."""
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


def imbalance(figures: Figures) -> float:
    """Return the requests of the busiest server divided by the mean."""
    counts = list(figures.by_server.values())
    return max(counts) * len(counts) / sum(counts) if counts and sum(counts) else 0.0


def _servers(columns: Mapping[str, Figures]) -> list[str]:
    return list(dict.fromkeys(server for figures in columns.values() for server in figures.by_server))


def _ms(seconds: float | None, *, digits: int = 0) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.{digits}f} ms"
