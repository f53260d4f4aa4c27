"""Makes a table from runs: each server with the cache and without, then the figures with the cache divided by
those without. Pure. The command calls this module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from bench.model_server.serving.turns import IN_TURNS

Line = list[str | float | int]

_ABOUT = ("engine", "layers", "requests", "shared", "own", "answered", "rate", "clock", "sides")
_OF_REPEATS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "median": median,
    "least": min,
    "most": max,
}


def table(runs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Line]]:
    """Return columns and lines. A ratio compares the two runs of one repeat."""
    sides: defaultdict[tuple[Any, ...], dict[bool, dict[int, Mapping[str, float]]]] = defaultdict(
        lambda: {True: {}, False: {}}
    )
    for run in runs:
        side = tuple(run.get(name, IN_TURNS) for name in _ABOUT)
        sides[side][run["cache"]][run["seed"]] = run["row"]
    names = list(runs[0]["row"]) if runs else []
    lines: list[Line] = []
    for side, by_cache in sorted(sides.items(), key=str):
        on, off = by_cache[True], by_cache[False]
        for word, rows in (("on", list(on.values())), ("off", list(off.values()))):
            lines += [[*side, word, *line] for line in _of_repeats(rows, names)]
        both = sorted(on.keys() & off.keys())
        ratios = [{name: on[n][name] / off[n][name] for name in names if name != "hits"} for n in both]
        lines += [[*side, "on / off", *line] for line in _of_repeats(ratios, names)]
    return [*_ABOUT, "cache", "repeats", "", *names], lines


def _of_repeats(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[Line]:
    """Return one line for a single repeat, otherwise one line for each of `_OF_REPEATS`."""
    kinds = list(_OF_REPEATS)[: len(_OF_REPEATS) if len(rows) > 1 else len(rows)]
    return [
        [
            len(rows),
            kind,
            *(_OF_REPEATS[kind]([row[name] for row in rows]) if name in rows[0] else "" for name in names),
        ]
        for kind in kinds
    ]
