"""Shows where adapters are: for each adapter, its share of the load and how many servers hold it, with the
LoRA mix.

The simulated engines are asked which adapters they hold each time a request ends, after the warm-up and until
the last arrival. Prints a table and writes JSON; `python -m bench.routing.adapters --help`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from bench.routing.bench import Run, Setting, calibrate, fleet_of, plan_of, spec_of
from bench.routing.catalog import BY_NAME
from bench.routing.workloads import OpenLoop, Timed
from epp.tools.replay.measure import WARM_UP_SHARE
from model_server.sim.engine import SimEngine
from model_server.sim.request import Record, SimRequest

WORKLOAD = "lora"
_GROUPS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32))
"""Ranks by popularity. Each range is one line of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copies of one adapter in one run."""

    adapter: str
    share: float
    """The adapter's share of the requests."""
    mean: float
    """The number of servers that hold the adapter: the mean over the ends of requests."""
    most: int
    """The most servers that held the adapter at the same time."""


class _Watching(OpenLoop):
    """Counts, at the end of each request, on how many servers each adapter is."""

    def __init__(self, timed: Sequence[Timed], *, rate_per_s: float) -> None:
        super().__init__(timed, rate_per_s=rate_per_s)
        self.engines: Mapping[str, SimEngine] = {}
        self.seen: list[Counter[str]] = []

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        if WARM_UP_SHARE * self.last_arrival_s <= now <= self.last_arrival_s:
            self.seen.append(Counter(a for e in self.engines.values() for a in e.resident_adapters))
        return super().after(record, now=now)


def copies_of(run: Run) -> list[Copies]:
    """Make one run of the LoRA mix, as `bench` runs it. The most popular adapter comes first."""
    spec = spec_of(run.workload)
    assert spec.make is not None
    timed = spec.make(
        random.Random(f"{spec.name} {run.seed}"), max(40, int(spec.num_requests * run.setting.scale))
    )
    workload = _Watching(timed, rate_per_s=run.load * run.capacity_per_s)
    fleet = fleet_of(run, spec, plan_of(run.setting, spec, arrivals_s=workload.last_arrival_s), workload)
    workload.engines = fleet.engines
    fleet.run()
    asked = Counter(t.request.adapter for t in timed)
    return [
        Copies(
            adapter=name,
            share=asked[name] / len(timed),
            mean=fmean(seen[name] for seen in workload.seen),
            most=max(seen[name] for seen in workload.seen),
        )
        for name in (f"lora-{n}" for n in range(spec.adapters))
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing.adapters", description=__doc__)
    parser.add_argument(
        "--rule",
        default="least-cost",
        choices=list(BY_NAME),
        metavar="NAME",
        help="rule to run (default %(default)s)",
    )
    parser.add_argument(
        "--loads", nargs="+", type=float, default=[0.5, 0.9, 1.3], help="loads, as shares of the capacity"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds to run (default 1 2 3)"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="send this many times the usual number of requests"
    )
    parser.add_argument(
        "--replicas", type=int, default=1, help="number of replicas of the picker (default %(default)s)"
    )
    parser.add_argument(
        "--share-delay",
        type=float,
        help="seconds until replicas know each other's picks (default: they never know them)",
    )
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args(argv)
    setting = Setting(scale=args.scale, replicas=args.replicas, share_delay_s=args.share_delay)
    capacity, _ = calibrate(WORKLOAD, setting)
    run = Run(workload=WORKLOAD, rule=args.rule, load=0, seed=0, setting=setting, capacity_per_s=capacity)
    found = {
        load: [copies_of(replace(run, load=load, seed=seed)) for seed in args.seeds] for load in args.loads
    }
    print(table_of(found))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:  # noqa: PTH123 - a path or /dev/stdout
            json.dump(
                {load: [[asdict(c) for c in one] for one in runs] for load, runs in found.items()}, file
            )


def table_of(found: Mapping[float, Sequence[Sequence[Copies]]]) -> str:
    """Return a line for each group of adapters: the share of the load of each adapter, and for each load the
    number of servers that hold one (mean, most).
    """
    header = " | ".join(f"load {load:g}: servers, mean and most" for load in found)
    lines = [
        f"| adapters by popularity | share of the load, each | {header} |",
        "|" + " --- |" * (2 + len(found)),
    ]
    for first, last in _GROUPS:
        cells, shares = [], []
        for runs in found.values():
            group = [copies for one in runs for copies in one[first - 1 : last]]
            shares += [copies.share for copies in group]
            cells.append(f"{fmean(c.mean for c in group):.2f}, {max(c.most for c in group)}")
        name = f"{first}" if first == last else f"{first} to {last}"
        lines.append(f"| {name} | {fmean(shares):.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
