"""Makes tables of the results. A place is one workload at one load."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from bench.routing.bench import Result
from bench.routing.catalog import is_ours
from bench.routing.rows import Row, mean_row, spread
from bench.routing.workloads import SPECS, label

REFERENCE = "least-cost"
_FIGURES = ("ttft_mean_s", "ttft_p90_s", "tpot_p90_s")
_GOALS = (1.05, 1.15, 1.15)
"""Quantiles of each figure, divided by that of the best other rule at a place."""
_LACKS = 0.03
"""A goodput that is lower than the best other rule's by this much counts as missed."""
_COLUMNS = (
    "| rule | TTFT mean s (spread) | p50 | p90 | p99 | TPOT p90 ms | hits | completed | good | load CoV | loads/1k | programs: mean, p99 s (ended) |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One rule on one workload at one load, over its seeds."""

    rule: str
    rows: tuple[Row, ...]
    mean: Row
    rate_per_s: float
    """The rate of arrivals, or of turns for closed loops."""


Cells = Mapping[tuple[str, float], Sequence[Cell]]
"""The cells by (workload, load), in the order of `_in_order`. The best mean TTFT comes first."""


def cells_of(results: Iterable[Result]) -> Cells:
    grouped: dict[tuple[str, float], dict[str, list[Row]]] = {}
    rates = {}
    for result in sorted(results, key=lambda each: each.run.seed):
        run = result.run
        place = (label(run.workload), run.load)
        rates[place] = run.load * run.capacity_per_s
        grouped.setdefault(place, {}).setdefault(run.rule, []).append(result.row)
    return {
        place: sorted(
            (Cell(rule, tuple(rows), mean_row(rows), rates[place]) for rule, rows in by_rule.items()),
            key=lambda cell: (cell.mean.ttft_mean_s, cell.rule),
        )
        for place, by_rule in sorted(grouped.items(), key=lambda item: _in_order(item[0]))
    }


def _in_order(place: tuple[str, float]) -> tuple[float, int, str]:
    """Return the sort key of a place: load first, then the order in which workloads are listed, with traces
    last. The order in the file of results does not matter.
    """
    workload, load = place
    listed = list(SPECS)
    return load, listed.index(workload) if workload in listed else len(listed), workload


def table(cells: Sequence[Cell]) -> str:
    lines = [_COLUMNS]
    for cell in cells:
        m = cell.mean
        mark = "**" if cell.rule == REFERENCE else ""
        lines.append(
            f"| {mark}{cell.rule}{mark} | {m.ttft_mean_s:.2f} ({spread(cell.rows, 'ttft_mean_s'):.2f}) "
            f"| {m.ttft_p50_s:.2f} | {m.ttft_p90_s:.2f} | {m.ttft_p99_s:.1f} | {m.tpot_p90_s * 1000:.0f} "
            f"| {m.hit_ratio:.3f} | {m.completed:.3f} | {m.good:.3f} | {m.load_cov:.2f} | {m.adapter_loads:.0f} "
            f"| {m.program_mean_s:.1f}, {m.program_p99_s:.1f} ({m.ended_programs:.0f}) |"
        )
    return "\n".join(lines)


def report(cells: Cells) -> str:
    """Return all tables, then the summary."""
    parts = [
        f"### {workload}, load {load:g} ({row[0].rate_per_s:.2f} requests/s)\n\n{table(row)}\n"
        for (workload, load), row in cells.items()
    ]
    return "\n".join([*parts, summary(cells)])


def summary(cells: Cells) -> str:
    """Return the table of each rule against the best rule at each place. The figures are geometric means,
    because places differ by orders of magnitude.
    """
    rules = sorted({cell.rule for row in cells.values() for cell in row})
    lines = [
        "| rule | mean TTFT, times the best | worst place | p90 TTFT, times the best | TPOT p90, times the best | good |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    scored = []
    for rule in rules:
        mean, worst = _against_best(cells, rule, "ttft_mean_s")
        p90, _ = _against_best(cells, rule, "ttft_p90_s")
        tpot, _ = _against_best(cells, rule, "tpot_p90_s")
        good = fmean(c.mean.good for row in cells.values() for c in row if c.rule == rule)
        scored.append((mean, f"| {rule} | {mean:.2f} | {worst:.1f} | {p90:.2f} | {tpot:.2f} | {good:.3f} |"))
    return "\n".join([*lines, *(line for _, line in sorted(scored))])


def _best(row: Sequence[Cell], figure: str) -> Cell:
    """Return the rule with the least value of a figure. For times per token, only rules that answered about
    as much as any other count, because a rule that answers few requests can answer them fast.
    """
    most = max(cell.mean.completed for cell in row)
    fair = [cell for cell in row if figure != "tpot_p90_s" or cell.mean.completed >= 0.9 * most]
    return min(fair, key=lambda cell: float(getattr(cell.mean, figure)))


def _against_best(cells: Cells, rule: str, figure: str) -> tuple[float, float]:
    """Return (geometric mean, largest) of the rule's figure divided by the best one at its place."""
    ratios = []
    for row in cells.values():
        best = getattr(_best(row, figure).mean, figure)
        ratios += [
            max(getattr(cell.mean, figure), 1e-9) / max(best, 1e-9) for cell in row if cell.rule == rule
        ]
    return math.exp(fmean(math.log(ratio) for ratio in ratios)), max(ratios)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of the default rule, divided by that of the best other rule at a place."""

    best: Cell
    ratio: float
    by_seed: tuple[float, ...]
    """The ratio of each seed, against the same other rule."""

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{_error(self.by_seed)}"


def goals(cells: Cells) -> str:
    """Return the default rule against the best other rule at each place, by each figure, with geometric means
    last. Each ratio is followed by its standard error over the seeds. A rule without runs of all seeds is
    left out.
    """
    lines = [
        (
            "| workload | load | seeds | least-cost TTFT mean / p90 s | best other mean | ratio | best other p90 | ratio "
            "| TPOT p90 ms | ratio | good, best other | completed |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    ratios: list[Sequence[Ratio]] = []
    lacking: list[float] = []
    for (workload, load), row in cells.items():
        mine = next((cell for cell in row if cell.rule == REFERENCE), None)
        others = [c for c in row if not is_ours(c.rule) and mine and len(c.rows) >= len(mine.rows)]
        if mine is None or not others:
            continue
        ratios.append([_ratio(mine, others, figure) for figure in _FIGURES])
        best_good = max(c.mean.good for c in others)
        lacking.append(best_good - mine.mean.good)
        lines.append(f"| {workload} | {load:g} | {_against_others(mine, ratios[-1], best_good)}")
    return "\n".join([*lines, *(_over_all(ratios, lacking) if ratios else ())])


def _ratio(mine: Cell, others: Sequence[Cell], figure: str) -> Ratio:
    best = _best(others, figure)

    def over(ours: Row, theirs: Row) -> float:
        return float(max(getattr(ours, figure), 1e-9) / max(getattr(theirs, figure), 1e-9))

    by_seed = tuple(map(over, mine.rows, best.rows))
    return Ratio(best=best, ratio=over(mine.mean, best.mean), by_seed=by_seed)


def _error(values: Sequence[float]) -> str:
    return f" ± {stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""


def _against_others(mine: Cell, ratios: Sequence[Ratio], best_good: float) -> str:
    m = mine.mean
    mean, p90, tpot = ratios
    return (
        f"{len(mine.rows)} | {m.ttft_mean_s:.2f} / {m.ttft_p90_s:.2f} "
        f"| {mean.best.rule} {mean.best.mean.ttft_mean_s:.2f} | {mean} "
        f"| {p90.best.rule} {p90.best.mean.ttft_p90_s:.2f} | {p90} "
        f"| {m.tpot_p90_s * 1000:.0f} | {tpot} "
        f"| {m.good:.3f}, {best_good:.3f} | {m.completed:.3f} |"
    )


def _geometric_mean(values: Iterable[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def _over_all(ratios: Sequence[Sequence[Ratio]], lacking: Sequence[float]) -> tuple[str, str]:
    """Return geometric means, and at how many places each goal is reached."""
    columns = list(zip(*ratios, strict=True))
    means = []
    for column in columns:
        by_seed = [_geometric_mean(seed) for seed in zip(*(each.by_seed for each in column), strict=False)]
        means.append(f"{_geometric_mean(each.ratio for each in column):.2f}{_error(by_seed)}")
    within = [
        sum(each.ratio < limit + 0.005 for each in column)  # Ratios are compared as printed, with two digits.
        for column, limit in zip(columns, _GOALS, strict=True)
    ]
    over_all = f"| all | | | | | {means[0]} | | {means[1]} | | {means[2]} | | |"
    reached = (
        f"\nOf {len(ratios)} places, mean TTFT is within {_GOALS[0]} of the best other rule's at {within[0]}, "
        f"p90 within {_GOALS[1]} at {within[1]}, TPOT p90 within {_GOALS[2]} at {within[2]}. "
        f"Goodput is under the best other's by {_LACKS} or more at {sum(each >= _LACKS for each in lacking)}."
    )
    return over_all, reached
