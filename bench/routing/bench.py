"""Plans and runs: describes the fleet, measures how much it can do, and makes one run after another in
parallel processes.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.routing.catalog import BY_NAME, router_of
from bench.routing.drawn_workloads import drawn
from bench.routing.more_workloads import MORE, PUBLIC, UNTUNED
from bench.routing.peer import HoldingRouter
from bench.routing.rows import Row, row_of
from bench.routing.traces import trace_spec
from bench.routing.workloads import SPECS, ClosedLoop, OpenLoop, Saturating, Spec, Timed
from epp.config.policy import Scrape
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Fleet, FleetPlan, Outcome

CACHE_TOKENS = 512_000
IN_FLIGHT_AT_CAPACITY = 16
"""Requests in flight at each server when capacity is measured."""
_IN_FLIGHT = (IN_FLIGHT_AT_CAPACITY, 32, 64, 128)
"""Requests in flight at each server when saturation is measured. The servers run 128 at most."""
CALIBRATION_RULE = "calibration"
"""The rule by which capacity is measured. It is not the product's rule, so that a change of the picker does
not change the loads at which the picker is measured.
"""
GRACE_S = 30.0
"""The run goes on for this long after the last arrival."""
_CLOSED_S = 300.0
Mix = Callable[[Sequence[Timed], random.Random], Sequence[Timed]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The fleet of a benchmark, without the workload and the load."""

    num_servers: int = 8
    scale: float = 1.0
    """The factor for the number of requests."""
    replicas: int = 1
    share_delay_s: float | None = None
    """The time until the other replicas of our picker know the picks of one replica. None means that replicas
    share nothing. Other rules never share.
    """
    scrape_interval_s: float = Scrape().interval_seconds
    unlike: int = 0
    """The number of servers, from the first on, that have half the speed and half the cache."""
    costs: str = ""
    """Constants of the servers' cost model that differ from `_COSTS`, as `name=number,name=number`."""
    block_tokens: int = 0
    """0: as the workload says."""
    step_tokens: int = 2048
    failing: int = 0
    """The number of servers, from the first on, that break off every answer at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The settings of one simulation."""

    workload: str
    rule: str
    load: float
    seed: int
    setting: Setting = field(default_factory=Setting)
    capacity_per_s: float = 0.0
    """Requests a second, or turns a second for a closed loop."""
    unloaded_s: float = 0.0
    """The mean time of a turn (thinking and answer) on an idle fleet, for a closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    run: Run
    row: Row


def spec_of(workload: str) -> Spec:
    """Return the workload of this name, or the trace at this path."""
    known = {**SPECS, **MORE, **UNTUNED, **PUBLIC}
    return known.get(workload) or drawn(workload) or trace_spec(Path(workload))


_COSTS = CostModel(decode_step_s=0.008, decode_per_request_s=0.0001, lora_load_s=0.5)


def costs_of(text: str) -> CostModel:
    """Return the cost model with these constants. ValueError, TypeError: the text names none, or is none."""
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return replace(_COSTS, **{name: float(number) for name, number in pairs})


def shape_of(spec: Spec, setting: Setting = Setting()) -> EngineShape:
    """Return the size of an 8B model on one data-centre card, with 4 LoRA slots."""
    block_tokens = setting.block_tokens or spec.block_tokens
    return EngineShape(
        num_blocks=CACHE_TOKENS // block_tokens,
        block_tokens=block_tokens,
        limits=SchedulerLimits(max_num_seqs=128, max_num_batched_tokens=setting.step_tokens, max_loras=4),
        costs=costs_of(setting.costs),
    )


def simulate(run: Run) -> Result:
    fleet, workload = _made(run)
    return Result(run=run, row=row_of(fleet.run(), programs_s=workload.programs_s))


def outcome_of(run: Run) -> Outcome:
    return _made(run)[0].run()


def _made(run: Run) -> tuple[Fleet, OpenLoop | ClosedLoop]:
    spec = spec_of(run.workload)
    workload, arrivals_s = work_of(run, spec)
    plan = plan_of(run.setting, spec, arrivals_s=arrivals_s)
    own_pages_s = BY_NAME[run.rule].pages_every_s
    if own_pages_s is not None:
        plan = replace(plan, scrape_interval_s=min(plan.scrape_interval_s, own_pages_s))
    return fleet_of(run, spec, plan, workload), workload


def work_of(run: Run, spec: Spec, mixed: Mix = lambda timed, _: timed) -> tuple[OpenLoop | ClosedLoop, float]:
    """Return the requests of a run, and the time at which the last one arrives."""
    rng, rate_per_s = random.Random(f"{spec.name} {run.seed}"), run.load * run.capacity_per_s
    if spec.make is not None:
        timed = spec.make(rng, max(40, int(spec.num_requests * run.setting.scale)))
        arriving = OpenLoop(mixed(timed, rng), rate_per_s=rate_per_s)
        return arriving, arriving.last_arrival_s
    assert spec.sessions is not None
    until_s = _CLOSED_S * run.setting.scale
    users = spec.users or max(1, round(rate_per_s * run.unloaded_s))
    ramp_s = min(60.0, until_s / 4)
    return ClosedLoop(spec.sessions(rng), users=users, until_s=until_s, ramp_s=ramp_s), until_s


def plan_of(setting: Setting, spec: Spec, *, arrivals_s: float) -> FleetPlan:
    shape = shape_of(spec, setting)
    shares = {f"pod-{n}": 0.5 for n in range(setting.unlike)}
    one_block = dict.fromkeys((f"pod-{n}" for n in range(setting.failing)), 1.5 / shape.num_blocks)
    return FleetPlan(
        shape=shape,
        num_servers=setting.num_servers,
        speeds=(0.5,) * setting.unlike,
        cache_shares=shares | one_block,  # what does not fit into one block fails at once
        scrape_interval_s=setting.scrape_interval_s,
        num_scrapers=setting.replicas,
        horizon_s=arrivals_s + GRACE_S,
    )


def fleet_of(run: Run, spec: Spec, plan: FleetPlan, workload: OpenLoop | ClosedLoop | Saturating) -> Fleet:
    """Return the run's router in front of simulated servers."""
    router = router_of(
        run.rule,
        shape=plan.shape,
        seed=run.seed,
        replicas=run.setting.replicas,
        share_delay_s=run.setting.share_delay_s,
        adapters=frozenset(f"lora-{n}" for n in range(spec.adapters)),
    )
    gate = router if isinstance(router, HoldingRouter) else None
    return Fleet(plan, router=router, workload=workload, rng=random.Random(run.seed), gate=gate)


def saturation(workload: str, setting: Setting) -> tuple[float, float]:
    """Return the highest rate of the fleet: the best of `calibrate`'s rates with 16 to 128 requests always in
    flight at each server.

    If prompts are most of the work, 16 requests keep a server busy. If answers are most of the work, batches
    of 128 reach twice the rate.
    """
    rates, calm_s = zip(*(calibrate(workload, setting, in_flight=n) for n in _IN_FLIGHT), strict=True)
    return max(rates), calm_s[0]


def calibrate(
    workload: str, setting: Setting, *, in_flight: int = IN_FLIGHT_AT_CAPACITY
) -> tuple[float, float]:
    """Return the rate of the fleet with this many requests in flight at each server, as (requests a second,
    mean seconds of an unloaded turn). This is the rate at which requests end between a fifth and four fifths
    of the run, with this many always in flight, routed by a cost rule with exact knowledge. Rules that find
    more in the caches can serve more requests, and other rules fewer. All rules run at the same offered
    rates.
    """
    spec = spec_of(workload)
    rng = random.Random(f"{spec.name} calibration")
    run = Run(
        workload=workload, rule=CALIBRATION_RULE, load=1.0, seed=0, setting=replace(setting, replicas=1)
    )
    in_flight *= setting.num_servers
    servers = replace(setting, scrape_interval_s=1.0, replicas=1, failing=0)
    plan = replace(plan_of(servers, spec, arrivals_s=1e9), horizon_s=1e9)
    if spec.make is not None:
        count = max(200, 3 * in_flight, int(spec.num_requests * setting.scale))
        requests = [timed.request for timed in spec.make(rng, count)]
        outcome = fleet_of(run, spec, plan, Saturating(requests, in_flight=in_flight)).run()
        return _rate(outcome), 0.0
    assert spec.sessions is not None
    seconds = max(60.0, 150.0 * setting.scale)
    busy = ClosedLoop(spec.sessions(rng), users=in_flight, until_s=seconds, ramp_s=1.0, speed=1000.0)
    rate = _rate(fleet_of(run, spec, replace(plan, horizon_s=seconds), busy).run())
    calm = ClosedLoop(spec.sessions(rng), users=2, until_s=4000.0, ramp_s=1.0)
    calm_outcome = fleet_of(run, spec, replace(plan, horizon_s=4000.0), calm).run()
    return rate, 2 * 4000.0 / sum(record.completed for record in calm_outcome.records)


def _rate(outcome: Outcome) -> float:
    ends = sorted(r.ended_s for r in outcome.records if r.ended_s is not None and r.completed)
    low, high = len(ends) // 5, 4 * len(ends) // 5
    return (high - low) / (ends[high] - ends[low])


def plan_runs(
    workloads: Iterable[str],
    rules: Sequence[str],
    *,
    loads: Sequence[float],
    seeds: Sequence[int],
    setting: Setting,
    capacities: dict[str, tuple[float, float]],
) -> list[Run]:
    return [
        Run(
            workload=workload,
            rule=rule,
            load=load,
            seed=seed,
            setting=setting,
            capacity_per_s=capacities[workload][0],
            unloaded_s=capacities[workload][1],
        )
        for workload in workloads
        for load in loads
        for seed in seeds
        for rule in rules
    ]


def run_all(runs: Sequence[Run], *, processes: int) -> Iterator[Result]:
    """Return the results in the given order, whichever run ends first."""
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(simulate, runs)
