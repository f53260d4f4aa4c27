"""Runs the autoscaling benchmark from the command line, and prints a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from bench.autoscaling.demand import Day
from bench.autoscaling.simulate import SIGNALS, Course, Plan, simulate
from bench.routing.bench import Setting, calibrate

_ABOUT = """\
Simulate a day of rising and falling load on simulated servers, with the real picker. A model of Kubernetes's
autoscaler follows a number that the picker reports. Print one row for each signal, target and start time. The
first two rows are fleets of constant size.
"""
_CALM, _PEAK = 1.0, 4.0
"""The lowest and the highest load, each as the number of servers that this load keeps busy."""


def main() -> int:
    args = _parser().parse_args()
    per_s = args.per_server or calibrate(args.workload, Setting(num_servers=2, scale=0.2))[0] / 2
    print(f"{args.workload}: a server completes {per_s:.2f} requests/s", file=sys.stderr)
    day = day_of(per_s, rise_s=args.rise)
    plans = plans_of(args.workload, day, quick=args.quick)
    with ProcessPoolExecutor(args.processes) as pool:
        print(_HEAD, flush=True)
        for name, course in zip(plans, pool.map(simulate, plans.values()), strict=True):
            print(f"| {name} | {' | '.join(_cells(course))} |", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling", description=_ABOUT)
    add = parser.add_argument
    add(
        "--workload",
        default="none",
        help="workload of bench.routing whose requests come at fixed times (default %(default)s)",
    )
    add(
        "--per-server",
        type=float,
        default=0.0,
        metavar="X",
        help="requests/s that one server can complete (default: measured first)",
    )
    add(
        "--rise",
        type=float,
        default=1200.0,
        metavar="S",
        help="seconds in which the load rises from low to its peak (default %(default)s)",
    )
    add("--quick", action="store_true", help="print only the first three rows")
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="number of runs at the same time (default %(default)s)",
    )
    return parser


_USUAL = "saturation 0.5"


def day_of(per_server_s: float, *, rise_s: float) -> Day:
    return Day(
        calm_per_s=_CALM * per_server_s,
        peak_per_s=_PEAK * per_server_s,
        calm_s=300,
        rise_s=rise_s,
        peak_s=300,
        fall_s=600,
        end_s=1800,
    )


def plans_of(workload: str, day: Day, *, quick: bool = False) -> Mapping[str, Plan]:
    usual = Plan(workload=workload, day=day)
    plans = {
        "always 2 servers": replace(usual, most=2),
        "always 8 servers": replace(usual, least=8),
        _USUAL: usual,
    }
    if quick:
        return plans
    plans |= {f"saturation {target}": replace(usual, target=target) for target in (0.4, 0.6, 0.7, 0.9)}
    plans |= {f"{_USUAL}, start {s:.0f} s": replace(usual, start_s=s) for s in (60.0, 300.0)}
    return plans | {
        f"{name} {SIGNALS[name].target}": replace(usual, signal=name)
        for name in SIGNALS
        if name != "saturation"
    }


_HEAD = """\
| autoscaler | TTFT p90 | worst 5 minutes | over 2 s | most servers | server-hours | changes | down and up again |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def _cells(course: Course) -> Iterable[str]:
    yield _seconds(course.ttft_p90_s)
    yield _seconds(course.worst_p90_s)
    yield f"{course.late:.1%}"
    yield str(course.most)
    yield f"{course.server_hours:.1f}"
    yield str(len(course.changes))
    yield str(course.turns)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


if __name__ == "__main__":
    sys.exit(main())
