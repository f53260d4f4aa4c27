"""Compares live figures with simulated ones, and shows how far both rank rules alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, median

from bench.routing.live.run import Result, Side
from bench.routing.rows import Row, mean_row, spread

APART = 0.15
"""Rules whose simulated means differ by less than this share count as equal."""

LATE_S = 0.05
"""If the generator was later than this, at p99, the run measured the machine's other programs rather than a
rule.
"""

Rows = Mapping[str, Mapping[Side, Sequence[Row]]]
"""The rows of one workload, by rule."""


def is_late(result: Result) -> bool:
    """Return whether a live run says nothing, because its generator had no core when it needed a core."""
    lateness = result.lateness
    return lateness is not None and max(lateness.sent_p99_s, lateness.loop_p99_s) > LATE_S


def rows_of(results: Sequence[Result]) -> dict[str, dict[str, dict[Side, list[Row]]]]:
    """Return the rows by workload and rule. Seeds that only one side has run are left out."""
    both = {r.key[:4] for r in results if r.side == "live"} & {
        r.key[:4] for r in results if r.side == "simulated"
    }
    found: dict[str, dict[str, dict[Side, list[Row]]]] = {}
    for result in sorted(results, key=lambda r: r.key):
        if result.key[:4] in both:
            sides = found.setdefault(result.workload, {}).setdefault(
                result.rule, {"live": [], "simulated": []}
            )
            sides[result.side].append(result.row)
    return found


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation: the pairs in the same order minus the pairs in the opposite order, as a
    share of all pairs. It is nan if there is no pair.
    """
    signs = [_sign(one[a] - one[b]) * _sign(other[a] - other[b]) for a, b in combinations(range(len(one)), 2)]
    return sum(signs) / len(signs) if signs else float("nan")


def agreeing(one: Sequence[float], other: Sequence[float], *, apart: float) -> tuple[int, int]:
    """Return (pairs in the same order, all pairs) for the pairs whose values in `one` differ by more than the
    share `apart`.
    """
    pairs = [
        (a, b)
        for a, b in combinations(range(len(one)), 2)
        if abs(one[a] - one[b]) > apart * min(one[a], one[b])
    ]
    return sum((one[a] < one[b]) == (other[a] < other[b]) for a, b in pairs), len(pairs)


def table(rows: Rows) -> str:
    """Return the table of one workload. The best live mean comes first."""
    lines = [
        (
            "| rule | TTFT mean s, live (spread) | simulated | TTFT p90 s, live | simulated | TPOT p90 ms, live | simulated "
            "| hits, live | simulated | completed, live | simulated |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rule in sorted(rows, key=lambda r: mean_row(rows[r]["live"]).ttft_mean_s):
        live, sim = (mean_row(rows[rule][side]) for side in _SIDES)
        lines.append(
            f"| {rule} | {live.ttft_mean_s:.3f} ({spread(rows[rule]['live'], 'ttft_mean_s'):.3f}) | {sim.ttft_mean_s:.3f} "
            f"| {live.ttft_p90_s:.3f} | {sim.ttft_p90_s:.3f} | {1000 * live.tpot_p90_s:.0f} | {1000 * sim.tpot_p90_s:.0f} "
            f"| {live.hit_ratio:.3f} | {sim.hit_ratio:.3f} | {live.completed:.3f} | {sim.completed:.3f} |"
        )
    return "\n".join(lines)


def ranks(by_workload: Mapping[str, Rows]) -> str:
    """Return how alike both sides rank the rules of each workload."""
    lines = [
        (
            "| workload | rules | repeats | tau of mean TTFT | of p90 | of hits "
            f"| pairs over {APART:.0%} apart in the same order | live / simulated mean TTFT: median (least to most) | hits: largest difference |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for workload, rows in by_workload.items():
        live, sim = ([mean_row(rows[rule][side]) for rule in rows] for side in _SIDES)
        same, pairs = agreeing([r.ttft_mean_s for r in sim], [r.ttft_mean_s for r in live], apart=APART)
        ratios = [a.ttft_mean_s / b.ttft_mean_s for a, b in zip(live, sim, strict=True)]
        taus = [
            f"{kendall([getattr(r, name) for r in live], [getattr(r, name) for r in sim]):.2f}"
            for name in ("ttft_mean_s", "ttft_p90_s", "hit_ratio")
        ]
        if workload == "none":
            taus[2] = "-"
        repeats = min(len(sides["live"]) for sides in rows.values())
        hits = max(abs(a.hit_ratio - b.hit_ratio) for a, b in zip(live, sim, strict=True))
        lines.append(
            f"| {workload} | {len(rows)} | {repeats} | {' | '.join(taus)} | {same} of {pairs} "
            f"| {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {hits:.3f} |"
        )
    return "\n".join(lines)


def replicas(results: Sequence[Result]) -> str:
    """Return the figures of several pickers relative to one picker, by the same rule on the same requests.
    The text is empty if no such pair ran on both sides.
    """
    rows = {result.key: result.row for result in results}
    places = sorted({(r.workload, r.rule) for r in results if _alone(r.rule) != r.rule})
    lines = []
    for workload, rule in places:
        seeds = [
            (seed, seconds)
            for (w, r, seed, seconds, side) in sorted(rows)
            if (w, r, side) == (workload, rule, "live")
            and all((w, n, seed, seconds, s) in rows for n in (rule, _alone(rule)) for s in _SIDES)
        ]
        if not seeds:
            continue
        cells = []
        for name in ("hit_ratio", "load_cov", "ttft_mean_s"):
            for side in _SIDES:
                one, several = (
                    fmean([getattr(rows[(workload, n, *seed, side)], name) for seed in seeds])
                    for n in (_alone(rule), rule)
                )
                cells.append(f"{several / one:.3f}" if one else "-")
        lines.append(f"| {workload} | {rule} | {len(seeds)} | {' | '.join(cells)} |")
    head = (
        "| workload | pickers | repeats | hits, times one picker's, live | simulated | load CoV, times one picker's, live "
        "| simulated | TTFT mean, times one picker's, live | simulated |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    return "\n".join([head, *lines]) if lines else ""


def _alone(rule: str) -> str:
    """Return the rule's name if it runs in one picker."""
    return rule.partition("*")[0].partition("/")[0]


def kept_up(results: Sequence[Result]) -> str:
    """Return the lines that show whether the machine was too busy for the runs."""
    seen = [result.lateness for result in results if result.lateness is not None]
    if not seen:
        return ""
    failed = [f for result in results for f in result.failures]
    shares = ", ".join(
        f"{name} {fmean([late.ran_share[name] for late in seen if name in late.ran_share]):.2f}"
        for name in ("servers", "picker", "redis", "envoy", "generator")
        if any(name in late.ran_share for late in seen)
    )
    return "\n".join(
        [
            (
                f"{len(seen)} live runs; failed requests: {len(failed)}{'; the first: ' + failed[0] if failed else ''}; bypassed the picker: {sum(late.bypassed for late in seen)}"
            ),
            f"delay of sending, p99 of each run: {_span([late.sent_p99_s for late in seen])}",
            f"delay of the generator's event loop, p99 of each run: {_span([late.loop_p99_s for late in seen])}",
            f"cores used on average: {shares}",
            (
                "seconds of waiting for a core, for each second of running: "
                f"{median(late.waited_share for late in seen):.2f} (median), {max(late.waited_share for late in seen):.2f} (most)"
            ),
        ]
    )


def report(all_results: Sequence[Result], *, late: bool = False) -> str:
    """Return the report of the runs whose generator was in time, or with `late` the report of all runs."""
    results = [result for result in all_results if late or not is_late(result)]
    left_out = len(all_results) - len(results)
    by_workload = rows_of(results)
    tables = [f"### {workload}\n\n{table(rows)}" for workload, rows in by_workload.items()]
    note = (
        f"{left_out} live runs are left out: their generator was late by more than {1000 * LATE_S:.0f} ms"
        if left_out
        else ""
    )
    parts = [ranks(by_workload), replicas(results), *tables, kept_up(results), note]
    return "\n\n".join(part for part in parts if part)


def _span(values: Sequence[float]) -> str:
    return f"{1000 * median(values):.0f} ms (median), {1000 * max(values):.0f} ms (most)"


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


_SIDES: tuple[Side, Side] = ("live", "simulated")
