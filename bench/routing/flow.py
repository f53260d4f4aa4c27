"""Compares settings of flow control in the simulated fleet: the same requests with flow control off and on.
Prints a table. See `--help`.

    python -m bench.routing.flow --workloads conversation,none --loads 0.9,1.3 --scale 0.3
    python -m bench.routing.flow --mix greedy --workloads b2b --loads 1.3,2.4 --settings off,queue

`good` is the share of all requests that were answered with TTFT <= 2 s and TPOT <= 100 ms; a refused request
is not good. Times are those of the answered requests. `by length` is `good` for each quarter of the requests
by prompt length, shortest first. A setting that refuses late requests refuses long prompts first, and this
column shows it. With `--mix`, `classes` shows good, the p90 of TTFT, and how much of its max-min fair share
each tenant got.
"""

import argparse
import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from bench.routing.bench import GRACE_S, Mix, Run, Setting, calibrate, plan_of, plan_runs, spec_of, work_of
from bench.routing.more_workloads import greedy_tenant
from bench.routing.picker_router import PickerRouter
from bench.routing.rows import GOOD_TTFT_S, is_good
from bench.routing.workloads import label
from epp.base.errors import PickError
from epp.config.flow import Flow
from epp.config.policy import DEFAULT_POLICY, Policy
from epp.picker.events import Pick
from epp.picker.gate import FlowClaim, Gate
from epp.tools.replay.simulate import WARM_UP_SHARE, quantile, tpot_s, ttft_s
from model_server.sim.fleet import WAITS, Fleet, Outcome
from model_server.sim.request import Record, SimRequest

_HOLD = Flow(mode="Hold", ttl_seconds=3600, objectives={str(n): n for n in range(-10, 11)})
SETTINGS = {
    "off": Flow(),
    "queue": _HOLD,
    "refuse": replace(_HOLD, deadline_seconds=GOOD_TTFT_S),
    "shortest": replace(_HOLD, order="Shortest"),
}
_DRAIN_S = 600.0
"""The run goes on for this long after the last arrival. If nothing is refused, the last answers come late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    good: float
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_max_s: float
    tpot_p90_s: float
    hit_ratio: float
    refused: float
    by_length: tuple[float, ...]
    by_class: dict[str, tuple[float, float]]
    """For each class of requests: the share that is good, and the p90 of TTFT."""
    of_max_min: dict[str, float]
    """The tokens that each tenant got, divided by its max-min fair share, if there are several tenants."""


class FlowRouter(PickerRouter):
    """A picker with flow control as the router of a simulated fleet: requests wait in the picker."""

    def __init__(self, policy: Policy, *, seed: int, adapters: frozenset[str] = frozenset()) -> None:
        """Make the picker. The policy's flow.objectives name each priority by its number."""
        super().__init__(policy, seed=seed, adapters=adapters)
        self._decided: list[tuple[int, str | None]] = []
        self._gate = Gate(self.pickers[0])

    def route(self, request: SimRequest, *, now: float) -> str | None:
        gate, picker, question = self._gate, self.pickers[0], self._pick_request(request)
        if not gate.on:
            return self._send(request, question, picker, now=now)

        def decided(fate: Pick | PickError, at: float) -> None:
            sent = None if isinstance(fate, PickError) else self._begun(request, fate, picker, now=at)
            self._decided.append((request.request_id, sent))

        claim = FlowClaim(objective=str(request.priority), tenant=request.tenant)
        try:
            fate = gate.offer(
                question, claim, decided, size_bytes=question.body_bytes, longest_s=float("inf"), now=now
            )
        except PickError:
            return None
        return self._begun(request, fate, picker, now=now) if isinstance(fate, Pick) else WAITS

    def decided(self, *, now: float) -> Iterator[tuple[int, str | None]]:
        self._gate.pump(now=now)
        decided, self._decided = self._decided, []
        yield from decided

    @property
    def due_s(self) -> float:
        return self._gate.due_at


def main() -> int:
    args = _parser().parse_args()
    names = [*filter(None, args.workloads.split(",")), *map(str, args.trace)]
    setting = Setting(num_servers=args.servers, scale=args.scale)
    print(
        "| workload | load | flow | good | TTFT mean, s | p90 | max | TPOT p90, ms | hits | refused | by length | classes |"
    )
    print("| --- " * 12 + "|")
    for name in names:
        capacity = calibrate(name, setting)
        for load in map(float, args.loads.split(",")):
            for arm in args.settings.split(","):
                runs = plan_runs(
                    [name],
                    [""],
                    loads=[load],
                    seeds=range(1, 1 + args.seeds),
                    setting=setting,
                    capacities={name: capacity},
                )
                rows = [row_of(outcome_of(run, SETTINGS[arm], args.mix)) for run in runs]
                print(_line(label(name), load, arm, rows), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--workloads",
        default="conversation,none",
        metavar="A,B",
        help="workloads to run (default %(default)s)",
    )
    add(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="use this trace as one more workload",
    )
    add(
        "--loads",
        default="0.5,0.9,1.3,2.0",
        metavar="X,Y",
        help="loads, as shares of the capacity (default %(default)s)",
    )
    add(
        "--settings",
        default="off,refuse,shortest",
        metavar="A,B",
        help=f"settings to compare, of {', '.join(SETTINGS)}",
    )
    add("--seeds", type=int, default=1, metavar="N", help="number of seeds (default %(default)s)")
    add(
        "--scale",
        type=float,
        default=0.3,
        metavar="X",
        help="send X times the usual number of requests (default %(default)s)",
    )
    add("--servers", type=int, default=8, metavar="N", help="number of servers (default %(default)s)")
    add("--mix", choices=_MIXES, default="", help="mix of request classes")
    return parser


_MIXES: dict[str, Mix] = {
    "": lambda timed, _: timed,
    "greedy": greedy_tenant,
}


def outcome_of(run: Run, flow: Flow, mix: str = "") -> Outcome:
    """Make one run with this flow control, and return its results. The rule is that of the default policy."""
    spec = spec_of(run.workload)
    workload, arrivals_s = work_of(run, spec, _MIXES[mix])
    plan = plan_of(run.setting, spec, arrivals_s=arrivals_s)
    plan = dataclasses.replace(plan, horizon_s=plan.horizon_s - GRACE_S + _DRAIN_S)
    adapters = frozenset(f"lora-{n}" for n in range(spec.adapters))
    router = FlowRouter(
        replace(DEFAULT_POLICY, spec=replace(DEFAULT_POLICY.spec, flow=flow)),
        seed=run.seed,
        adapters=adapters,
    )
    gate = router if flow.mode == "Hold" else None
    return Fleet(plan, router=router, workload=workload, rng=random.Random(run.seed), gate=gate).run()


def row_of(outcome: Outcome) -> Row:
    ordered = sorted(outcome.records, key=lambda r: (r.arrived_s, r.request.request_id))
    records = ordered[int(WARM_UP_SHARE * len(ordered)) :]
    served = [r for r in records if r.server]
    waits = sorted(ttft_s(r, outcome.ended_s) for r in served)
    tpots = sorted(t for t in map(tpot_s, served) if t is not None)
    seen = [r for r in records if r.num_cached_tokens is not None]
    prompt = sum(r.num_prompt_tokens for r in seen)
    classes: dict[str, list[Record]] = {}
    for record in records:
        request = record.request
        if request.tenant or request.priority:
            classes.setdefault(request.tenant or f"priority {request.priority}", []).append(record)
    return Row(
        good=_good(records),
        ttft_mean_s=fmean(waits) if waits else 0.0,
        ttft_p90_s=quantile(waits, 0.9),
        ttft_max_s=waits[-1] if waits else 0.0,
        tpot_p90_s=quantile(tpots, 0.9),
        hit_ratio=sum(r.num_cached_tokens or 0 for r in seen) / prompt if prompt else 0.0,
        refused=1 - len(served) / len(records),
        by_length=_by_length(records),
        by_class={name: (_good(of), _p90(of, outcome.ended_s)) for name, of in sorted(classes.items())},
        of_max_min=of_max_min(records),
    )


def _good(records: Sequence[Record]) -> float:
    return sum(map(is_good, records)) / len(records)


def _p90(records: Sequence[Record], ended_s: float) -> float:
    return quantile(sorted(ttft_s(r, ended_s) for r in records if r.server), 0.9)


def _by_length(records: Sequence[Record], parts: int = 4) -> tuple[float, ...]:
    by_length = sorted(records, key=lambda r: r.num_prompt_tokens)
    edges = [len(by_length) * n // parts for n in range(parts + 1)]
    return tuple(_good(by_length[low:high]) for low, high in pairwise(edges))


def _line(workload: str, load: float, arm: str, rows: Sequence[Row]) -> str:
    def mean(name: str) -> float:
        return fmean(getattr(row, name) for row in rows)

    lengths = " ".join(f"{fmean(of):.2f}" for of in zip(*(row.by_length for row in rows), strict=True))
    classes = "; ".join(_class(name, rows) for name in rows[0].by_class)
    return (
        f"| {workload} | {load:g} | {arm} | {mean('good'):.3f} | {mean('ttft_mean_s'):.2f} | {mean('ttft_p90_s'):.2f}"
        f" | {mean('ttft_max_s'):.1f} | {mean('tpot_p90_s') * 1000:.0f} | {mean('hit_ratio'):.3f}"
        f" | {mean('refused'):.2f} | {lengths} | {classes} |"
    )


def _class(name: str, rows: Sequence[Row]) -> str:
    good = fmean(row.by_class[name][0] for row in rows)
    p90_s = fmean(row.by_class[name][1] for row in rows)
    fair = [row.of_max_min[name] for row in rows if name in row.of_max_min]
    return f"{name} {good:.2f}, {p90_s:.1f} s" + (f", {fmean(fair):.2f} of max-min" if fair else "")


_LAST = 0.1


def max_min(asked: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Return the fair share of each tenant: no tenant gets more than it asks for, and no tenant could get
    more without taking tokens from a tenant with an equal or smaller share.
    """
    shares: dict[str, float] = {}
    left = capacity
    for name, wanted in sorted(asked.items(), key=lambda item: item[1]):
        shares[name] = min(wanted, left / (len(asked) - len(shares)))
        left -= shares[name]
    return shares


def of_max_min(records: Sequence[Record]) -> dict[str, float]:
    """Return for each tenant the tokens computed for it, divided by its fair share of all tokens that were
    computed. A request that was never computed counts as if it had no cached tokens.

    Counting stops at the last arrival, since no tenant competes afterwards. Requests that came in the last
    tenth of this time are left out, since they had no time to be served.
    """
    until_s = max((record.arrived_s for record in records), default=0.0)
    asked: dict[str, float] = {}
    had: dict[str, float] = {}
    first_s = min((record.arrived_s for record in records), default=0.0)
    for record in records:
        if record.arrived_s > until_s - _LAST * (until_s - first_s):
            continue
        tenant = record.request.tenant
        tokens = record.num_prompt_tokens - (record.num_cached_tokens or 0)
        asked[tenant] = asked.get(tenant, 0.0) + tokens
        computed = record.first_token_s is not None and record.first_token_s <= until_s
        had[tenant] = had.get(tenant, 0.0) + (tokens if computed else 0.0)
    fair = max_min(asked, sum(had.values()))
    return {tenant: had[tenant] / fair[tenant] for tenant in asked if fair[tenant] > 0}


if __name__ == "__main__":
    sys.exit(main())
