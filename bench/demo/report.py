"""Turns the figures of each rule's run into a table for people and a document for programs. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bench.tables import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFigures:
    """The results of one run of the workload."""

    rule: str
    requests: int
    failed: int
    failures: tuple[str, ...]
    """The messages of the first few failures."""
    duration_s: float
    queried_tokens: int
    hit_tokens: int
    """Prompt tokens looked up in the servers' prefix caches, and found there,
    by the servers' own counters."""
    ttfts_s: tuple[float, ...]
    """Times to the first token, after the warm-up."""
    requests_by_server: tuple[int, ...]
    picker_cpu_s: float
    """CPU seconds of the picker's process during the run."""
    picker_idle_cpu_s: float
    """CPU seconds that the picker would have used in that time without requests: scrapes, watched files."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def computed_tokens(self) -> int:
        return self.queried_tokens - self.hit_tokens

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.failed) / self.duration_s

    @property
    def picker_cpu_s_per_request(self) -> float:
        return (self.picker_cpu_s - self.picker_idle_cpu_s) / self.requests


@dataclass(frozen=True, slots=True)
class _Row:
    title: str
    value: Callable[[RuleFigures], float]
    show: Callable[[float], str]
    compare: bool = True
    """True if the table shows a ratio to the first rule for this figure."""


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value * 1000:,.0f} ms"


def _fine_ms(value: float) -> str:
    """Return the time as text. A value below zero means that the idle CPU varied by more than the CPU of the
    requests.
    """
    return "-" if math.isnan(value) or value < 0 else f"{value * 1000:.2f} ms"


_ROWS: Final = (
    _Row("token hit rate", lambda f: f.hit_rate, lambda v: f"{v * 100:.1f} %"),
    _Row("prompt tokens computed", lambda f: f.computed_tokens, lambda v: f"{v:,.0f}"),
    _Row("TTFT p50", lambda f: percentile(f.ttfts_s, 0.5), _ms),
    _Row("TTFT p90", lambda f: percentile(f.ttfts_s, 0.9), _ms),
    _Row("requests/s", lambda f: f.requests_per_s, lambda v: f"{v:.2f} /s"),
    _Row("failed requests", lambda f: f.failed, lambda v: f"{v:.0f}", compare=False),
    _Row("picker CPU per request", lambda f: f.picker_cpu_s_per_request, _fine_ms),
)


def _ratio(value: float, base: float) -> str:
    if not base > 0 or not value >= 0:
        return "-"
    return f"{value / base:.2f}x"


def table(figures: Sequence[RuleFigures]) -> str:
    """Return a table with a column for each rule. Each rule except the first also has its ratio to the
    first.
    """
    first = figures[0]
    rows = [["", *_header(figures)]]
    for row in _ROWS:
        base = row.value(first)
        cells = [row.show(base)]
        for other in figures[1:]:
            cells += [row.show(row.value(other)), _ratio(row.value(other), base) if row.compare else ""]
        rows.append([row.title, *cells])
    for n in range(len(first.requests_by_server)):
        title = "requests by server" if n == 0 else ""
        cells = [_share(first, n)]
        for other in figures[1:]:
            cells += [_share(other, n), ""]
        rows.append([f"{title:<20}s{n + 1}", *cells])
    return _aligned(rows)


def _header(figures: Sequence[RuleFigures]) -> list[str]:
    names = [figures[0].rule]
    for other in figures[1:]:
        names += [other.rule, "ratio"]
    return names


def _share(figures: RuleFigures, server: int) -> str:
    return f"{figures.requests_by_server[server]:,}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = []
    for n, row in enumerate(rows):
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  " + "   ".join(cells).rstrip())
        if n == 0:
            lines.append("  " + "   ".join("─" * w for w in widths))
    return "\n".join(lines)


def footnotes(figures: Sequence[RuleFigures], *, reusable_share: float) -> str:
    """Return the lines that say what was measured and what failed."""
    counted = " and ".join(dict.fromkeys(str(len(f.ttfts_s)) for f in figures))
    idle_ms_per_s = figures[0].picker_idle_cpu_s / figures[0].duration_s * 1000
    lines = [
        f"Each rule got the same {figures[0].requests} requests, from empty caches.",
        f"TTFT: time until the client has the first token, of {counted} requests. Each user's first request is not counted.",
        f"Token hit rate: by the servers' own counters. A cache that forgets nothing would reach about {reusable_share:.0%}.",
        f"Picker CPU: the picker's whole process, minus the {_idle(idle_ms_per_s)} that it uses without requests.",
    ]
    lines += [f"{f.rule}: a request failed: {text}" for f in figures for text in f.failures]
    return "\n".join(f"  {line}" for line in lines) + "\n"


def _idle(ms_per_s: float) -> str:
    return "(unknown)" if math.isnan(ms_per_s) else f"{ms_per_s:.0f} ms a second"


def document(figures: Sequence[RuleFigures], *, seed: int, servers: int) -> dict[str, Any]:
    """Return the document for `--json`: the table's figures in base units, and how they were made."""
    return {
        "seed": seed,
        "servers": servers,
        "rules": [_entry(f) for f in figures],
    }


def _entry(figures: RuleFigures) -> dict[str, Any]:
    raw = asdict(figures)
    ttfts_s = raw.pop("ttfts_s")
    return {
        **raw,
        "token_hit_rate": figures.hit_rate,
        "computed_tokens": figures.computed_tokens,
        "requests_per_s": figures.requests_per_s,
        "picker_cpu_s_per_request": figures.picker_cpu_s_per_request,
        "ttft_n": len(ttfts_s),
        "ttft_p50_s": percentile(ttfts_s, 0.5),
        "ttft_p90_s": percentile(ttfts_s, 0.9),
    }
