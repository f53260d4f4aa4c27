"""The demo's table and document: ratios, percentiles, missing figures, alignment."""

from __future__ import annotations

import math
from dataclasses import replace

from bench.demo.report import RuleFigures, footnotes, table

BASE = RuleFigures(
    rule="round-robin",
    requests=100,
    failed=0,
    failures=(),
    duration_s=20.0,
    queried_tokens=1000,
    hit_tokens=400,
    ttfts_s=(0.4, 0.1, 0.3, 0.2),
    requests_by_server=(50, 50),
    picker_cpu_s=0.5,
    picker_idle_cpu_s=0.2,
)
BETTER = replace(BASE, rule="least-cost", hit_tokens=800, ttfts_s=(0.05, 0.1), requests_by_server=(1060, 40))


def cells(text: str, title: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(title))
    return line.replace(title, "").split()


def test_the_table_shows_rules_side_by_side_with_the_ratio_to_the_first() -> None:
    text = table([BASE, BETTER])
    assert cells(text, "token hit rate") == ["40.0", "%", "80.0", "%", "2.00x"]
    assert cells(text, "prompt tokens computed") == ["600", "200", "0.33x"]
    assert cells(text, "TTFT p50") == ["200", "ms", "50", "ms", "0.25x"]
    assert cells(text, "requests/s") == ["5.00", "/s", "5.00", "/s", "1.00x"]
    assert cells(text, "picker CPU per request") == ["3.00", "ms", "3.00", "ms", "1.00x"]
    assert cells(text, "failed requests") == ["0", "0"]
    assert cells(text, "requests by server  s1") == ["50", "1,060"]


def test_figures_that_could_not_be_measured_are_dashes() -> None:
    unknown = replace(BETTER, ttfts_s=(), picker_cpu_s=math.nan)
    text = table([BASE, unknown])
    assert cells(text, "TTFT p90") == ["400", "ms", "-", "-"]
    assert cells(text, "picker CPU per request") == ["3.00", "ms", "-", "-"]


def test_footnotes_say_what_was_counted_and_name_the_failures() -> None:
    failing = replace(BETTER, failed=1, failures=("status 503: no endpoint",))
    text = footnotes([BASE, failing], reusable_share=0.84)
    assert "of 4 and 2 requests" in text
    assert "84%" in text
    assert "10 ms a second" in text
    assert "least-cost: a request failed: status 503: no endpoint" in text
