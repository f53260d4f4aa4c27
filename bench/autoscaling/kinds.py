"""Simulates the same day of load for several kinds of requests and several seeds: `python -m
bench.autoscaling.kinds`. Prints a table with one row for each day.

A server counts as added in time if the p90 of the time to first token stays below the goal in every five
minutes, from the first request to the last.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from bench.autoscaling.__main__ import day_of
from bench.autoscaling.demand import rate_at
from bench.autoscaling.simulate import Course, Plan, simulate
from bench.routing.bench import Setting, calibrate
from bench.routing.workloads import label

_RISE_S = 1200.0
_HEAD = """\
| load | target | seed | first server asked for at | TTFT p90 | worst 5 minutes | in time | most servers | server-hours | changes | down and up again |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling.kinds", description=__doc__)
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["none", "b2b", "lora", "retrieval"],
        metavar="NAME",
        help="kinds of load (default none b2b lora retrieval)",
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        type=float,
        default=[0.5, 0.7],
        metavar="X",
        help="targets of the saturation (default 0.5 0.7)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=1, help="number of runs at the same time (default %(default)s)"
    )
    args = parser.parse_args()
    rates = {name: round(per_server_s(name), 2) for name in args.workloads}
    print(f"requests/s that one server completes: {rates}", file=sys.stderr)
    plans = [
        Plan(workload=name, day=day_of(rates[name], rise_s=_RISE_S), target=target, seed=seed)
        for name in args.workloads
        for target in args.targets
        for seed in range(1, args.seeds + 1)
    ]
    print(_HEAD, flush=True)
    with ProcessPoolExecutor(args.processes) as pool:
        for plan, course in zip(plans, pool.map(simulate, plans), strict=True):
            print(f"| {' | '.join(_cells(course, rates[plan.workload]))} |", flush=True)


def per_server_s(workload: str) -> float:
    return calibrate(workload, Setting(num_servers=2, scale=0.2))[0] / 2


def _cells(course: Course, per_server_s: float) -> Iterable[str]:
    plan, added_at_s = course.plan, course.added_at_s
    load = rate_at(plan.day.rates(), added_at_s) / per_server_s if added_at_s is not None else None
    yield label(plan.workload)
    yield str(plan.target)
    yield str(plan.seed)
    yield f"{load:.1f} servers' load" if load is not None else "never"
    yield f"{course.ttft_p90_s:.2f} s"
    yield f"{course.worst_p90_s:.2f} s"
    yield "yes" if course.broke_at_s is None else "no"
    yield str(course.most)
    yield f"{course.server_hours:.1f}"
    yield str(len(course.changes))
    yield str(course.turns)


if __name__ == "__main__":
    main()
