"""Measures what a wrong first belief about the size of caches costs, if servers do not state this size.

The effect of the belief shows in the mean TTFT after the first minutes, compared with the right belief on the
same workload and seed. Prints a table and writes JSON; `python -m bench.routing.cache_size --help`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from statistics import fmean, median

import msgspec

from bench.routing.bench import CACHE_TOKENS, Setting, calibrate, plan_of, spec_of
from bench.routing.picker_router import PickerRouter
from bench.routing.workloads import OpenLoop
from epp.config.policy import DEFAULT_POLICY, Policy
from model_server.sim.fleet import Fleet

WARM_UP_S = 300.0
"""The time in which the picker may find out the size."""
_MEASURED_S = 300.0
BELIEFS = (0.25, 0.5, 1.0, 2.0, 8.0)
"""First beliefs, as shares of the true size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    workload: str
    belief: float
    seed: int
    load: float
    capacity_per_s: float
    learn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    trial: Trial
    ttft_mean_s: float
    hit_ratio: float
    believed: float
    """The size believed at the end, as a share of the true size. This is a mean over the servers."""


def policy_believing(tokens: int, *, learn: bool) -> Policy:
    spec = DEFAULT_POLICY.spec
    table = msgspec.structs.replace(spec.table, default_capacity_tokens=tokens, learn_capacity=learn)
    return msgspec.structs.replace(DEFAULT_POLICY, spec=msgspec.structs.replace(spec, table=table))


def run(trial: Trial) -> Found:
    spec = spec_of(trial.workload)
    assert spec.make is not None, "an open loop"
    rate = trial.load * trial.capacity_per_s
    count = int(rate * (WARM_UP_S + _MEASURED_S))
    workload = OpenLoop(spec.make(random.Random(f"{spec.name} {trial.seed}"), count), rate_per_s=rate)
    policy = policy_believing(int(trial.belief * CACHE_TOKENS), learn=trial.learn)
    router = PickerRouter(policy, seed=trial.seed, absent=("capacity_tokens",))
    plan = plan_of(Setting(), spec, arrivals_s=workload.last_arrival_s)
    outcome = Fleet(plan, router=router, workload=workload, rng=random.Random(trial.seed)).run()
    late = [r for r in outcome.records if r.arrived_s >= WARM_UP_S]
    ttft = [(r.first_token_s if r.first_token_s is not None else outcome.ended_s) - r.arrived_s for r in late]
    table = router.pickers[0].table
    sizes = [table.mirrors[name].capacity_bytes / (4.0 * CACHE_TOKENS) for name in table.mirrors]
    return Found(
        trial=trial,
        ttft_mean_s=fmean(ttft),
        hit_ratio=sum(r.num_cached_tokens or 0 for r in late) / sum(r.num_prompt_tokens for r in late),
        believed=fmean(sizes),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--workloads", nargs="+", default=["b2b", "hot", "conversation"], help="workloads to run"
    )
    parser.add_argument(
        "--beliefs",
        nargs="+",
        type=float,
        default=list(BELIEFS),
        help="first beliefs, as shares of the true size",
    )
    parser.add_argument(
        "--loads", nargs="+", type=float, default=[0.9], help="loads, as shares of the capacity"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="seeds to run (default 1)")
    parser.add_argument(
        "--processes", type=int, default=2, help="number of runs at the same time (default %(default)s)"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args(argv)
    print("measuring the capacity of the fleet for each workload", flush=True)
    trials = []
    for workload in args.workloads:
        capacity, _ = calibrate(workload, Setting())
        trials += [
            Trial(
                workload=workload, belief=belief, seed=seed, load=load, capacity_per_s=capacity, learn=learn
            )
            for load in args.loads
            for learn in (False, True)
            for belief in args.beliefs
            for seed in args.seeds
        ]
    with ProcessPoolExecutor(args.processes) as pool:
        found = []
        for n, one in enumerate(pool.map(run, trials)):
            print(f"\r{n + 1} of {len(trials)} runs", end="", flush=True)
            found.append(one)
    print("\n")
    print(table_of(found))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:  # noqa: PTH123 - a path or /dev/stdout
            json.dump([asdict(f) for f in found], file, indent=1)


def table_of(found: Sequence[Found]) -> str:
    """Return a line for each workload, load and first belief, with means over the seeds, without and with
    learning. The ratio is the median over the seeds of the mean TTFT divided by the mean TTFT with the right
    size and without learning.
    """
    by_cell: dict[tuple[str, float, float, bool], list[Found]] = {}
    for one in found:
        t = one.trial
        by_cell.setdefault((t.workload, t.load, t.belief, t.learn), []).append(one)
    lines = [
        "| workload | load | believed at first | TTFT, not learned | x right | TTFT, learned | x right | believed after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload, load, belief, learn in by_cell:
        if learn:
            continue
        right = by_cell.get((workload, load, 1.0, False), [])
        cells = []
        for way in (False, True):
            cell = by_cell[workload, load, belief, way]
            ratio = (
                median(a.ttft_mean_s / b.ttft_mean_s for a, b in zip(cell, right, strict=True))
                if right
                else 0
            )
            cells.append(f"{fmean(f.ttft_mean_s for f in cell):.3f} | {ratio:.2f}")
        after = fmean(f.believed for f in by_cell[workload, load, belief, True])
        lines.append(f"| {workload} | {load} | {belief} | {cells[0]} | {cells[1]} | {after:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
