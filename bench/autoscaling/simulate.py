"""Simulates one day of rising and falling load on a fleet whose size an autoscaler changes. Pure: the same
seed gives the same result.

The picker is the real one, and its signal is the value of `epp_pool_saturation`. Prometheus is modelled as a
mean over the last minute's samples. The autoscaler is `autoscaler.py`. A new server starts to serve `start_s`
after it was requested, with an empty cache. The newest server is removed first: it gets no new requests and
finishes its current ones.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from bench.autoscaling.autoscaler import SYNC_S, Autoscaler, Behaviour
from bench.autoscaling.demand import Day, Demand
from bench.routing.bench import shape_of, spec_of
from bench.routing.picker_router import PickerRouter
from epp.config.policy import DEFAULT_POLICY
from epp.observe.telemetry.picker_state import EndpointStatus
from epp.observe.telemetry.pool_status import PoolStatus, pools_of
from epp.serve.state_report import endpoints_of
from epp.tools.replay.measure import quantile, ttft_s
from model_server.sim.fleet import Change, Fleet, FleetPlan
from model_server.sim.request import Record

SAMPLES = 4
"""Number of samples in Prometheus's `avg_over_time(...[1m])`: one for each 15 s."""
_STRETCH_S = 300.0
"""Length of the stretches of the day whose p90 is computed. Shorter stretches have too few requests to
distinguish a rise from chance.
"""
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Signal:
    """A number that an autoscaler can follow, and its default target."""

    read: Callable[[PoolStatus, Sequence[EndpointStatus]], float]
    target: float


def _waiting(pool: PoolStatus, servers: Sequence[EndpointStatus]) -> float:
    return fmean(server.waiting or 0.0 for server in servers)


SIGNALS: Mapping[str, Signal] = {
    "saturation": Signal(lambda pool, _: pool.saturation, 0.5),
    "busy": Signal(lambda pool, _: pool.busy, 0.7),
    "undone": Signal(lambda pool, _: pool.waiting_s["servers"] / _goal_s(), 0.7),
    "waiting": Signal(_waiting, 1.0),
    "kv": Signal(lambda pool, _: pool.kv_usage, 0.7),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    workload: str
    day: Day
    signal: str = "saturation"
    target: float = 0.0
    """0 means the default target of the signal."""
    least: int = 2
    most: int = 8
    start_s: float = 120.0
    """Seconds from the request for a new server until this server serves."""
    behaviour: Behaviour = field(default_factory=Behaviour)
    seed: int = 1

    @property
    def fixed(self) -> bool:
        return self.least == self.most


@dataclass(frozen=True, slots=True)
class Moment:
    """The input and the decision of the autoscaler at one time."""

    at_s: float
    value: float | None
    servers: int
    """The number of servers that were requested."""
    ready: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """The requests that came within one stretch of `_STRETCH_S`."""

    at_s: float
    requests: int
    ttft_p90_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The results of one day."""

    plan: Plan
    moments: Sequence[Moment]
    stretches: Sequence[Stretch]
    ttft_p90_s: float
    ttft_p99_s: float
    late: float
    """The share of all requests whose first token took longer than the goal."""
    goal_s: float

    @property
    def changes(self) -> list[tuple[float, int]]:
        """Return the times at which the number of servers changed, and by how many."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return [(b.at_s, b.servers - a.servers) for a, b in pairs if a.servers != b.servers]

    @property
    def added_at_s(self) -> float | None:
        """Return the time at which the first server was requested."""
        return next((at for at, by in self.changes if by > 0), None)

    @property
    def broke_at_s(self) -> float | None:
        """Return the time of the first stretch whose p90 exceeds the goal."""
        return next((m.at_s for m in self.stretches if m.ttft_p90_s > self.goal_s), None)

    @property
    def worst_p90_s(self) -> float:
        return max(m.ttft_p90_s for m in self.stretches)

    @property
    def turns(self) -> int:
        """Return how often the number of servers fell and then rose again (thrashing)."""
        steps = [by for _, by in self.changes]
        return sum(1 for a, b in itertools.pairwise(steps) if a < 0 < b)

    @property
    def most(self) -> int:
        return max(m.servers for m in self.moments)

    @property
    def server_hours(self) -> float:
        return fmean(m.servers for m in self.moments) * self.plan.day.lasts_s / 3600


class _Scaling:
    """Scales the fleet: passes the picker's signal to the autoscaler, and makes the change."""

    every_s = SYNC_S

    def __init__(self, plan: Plan, router: PickerRouter) -> None:
        signal = SIGNALS[plan.signal]
        self._read = signal.read
        self._start_s = plan.start_s
        self._router = router
        self._autoscaler = Autoscaler(
            target=plan.target or signal.target,
            least=plan.least,
            most=plan.most,
            behaviour=plan.behaviour,
        )
        self._ready_at = {f"pod-{n}": 0.0 for n in range(plan.least)}
        """The servers that were requested, the newest last."""
        self._number = plan.least
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.moments = [Moment(0.0, None, plan.least, plan.least)]

    def changes(self, *, now: float) -> Iterable[Change]:
        picker = self._router.pickers[0]
        servers = endpoints_of(picker, {}, now=now)
        for pool in pools_of(servers, [], goal_s=picker.policy.spec.flow.goal_seconds):
            self._samples.append(self._read(pool, servers))
        there = len(self._ready_at)
        ready = sum(at <= now for at in self._ready_at.values())
        value = fmean(self._samples) if self._samples else None
        wanted = self._autoscaler.servers(value, requested=there, ready=ready, now=now)
        self.moments.append(Moment(now, value, wanted, ready))
        for _ in range(wanted - there):
            name = f"pod-{self._number}"
            self._number += 1
            self._ready_at[name] = now + self._start_s
            yield Change(at_s=now + self._start_s, add=name)
        for _ in range(there - wanted):
            name, ready_at_s = self._ready_at.popitem()
            yield Change(at_s=max(now, ready_at_s), remove=name)


def simulate(plan: Plan) -> Course:
    spec = spec_of(plan.workload)
    assert spec.make is not None, "only workloads whose requests do not depend on earlier requests"
    rng = random.Random(f"{spec.name} {plan.seed}")
    demand = Demand(spec.make(rng, plan.day.requests), plan.day.rates())
    router = PickerRouter(
        DEFAULT_POLICY, seed=plan.seed, adapters=frozenset(f"lora-{n}" for n in range(spec.adapters))
    )
    scaling = _Scaling(plan, router)
    fleet = FleetPlan(shape=shape_of(spec), num_servers=plan.least, horizon_s=plan.day.lasts_s + _GRACE_S)
    outcome = Fleet(fleet, router=router, workload=demand, rng=random.Random(plan.seed), scaler=scaling).run()
    return _course(plan, outcome.records, scaling.moments, outcome.ended_s, _goal_s())


def _goal_s() -> float:
    return DEFAULT_POLICY.spec.flow.goal_seconds


def _course(
    plan: Plan, records: Sequence[Record], moments: Sequence[Moment], ended_s: float, goal_s: float
) -> Course:
    by_stretch: dict[int, list[float]] = {}
    for record in records:
        by_stretch.setdefault(int(record.arrived_s // _STRETCH_S), []).append(ttft_s(record, ended_s))
    ttft = sorted(value for values in by_stretch.values() for value in values)
    return Course(
        plan=plan,
        moments=[m for m in moments if m.at_s <= plan.day.lasts_s],
        stretches=[
            Stretch(_STRETCH_S * number, len(values), quantile(sorted(values), 0.9))
            for number, values in sorted(by_stretch.items())
        ],
        ttft_p90_s=quantile(ttft, 0.9),
        ttft_p99_s=quantile(ttft, 0.99),
        late=sum(value > goal_s for value in ttft) / len(ttft),
        goal_s=goal_s,
    )
