"""Many servers, a router and a workload on one virtual clock.

This module owns the clock, which is a heap of events. Each event has a time and a number, so that events of
the same time keep the order in which they were planned. The same inputs give the same run, byte for byte.
Only the phases and the jitter of the scrapes are random, from the given generator.

The router is asked at each arrival, and is told the events that a proxy would see: the first token, the end
of the answer, and scrapes. It may use any of these events. A server that dies fails its requests; the
workload is told and may continue.

Callers: benchmarks and tests. This module knows no routing rule.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from model_server.sim.engine import EngineShape, SimEngine, Snapshot, snapshot
from model_server.sim.job import Job
from model_server.sim.prompts import block_names
from model_server.sim.request import Record, SimRequest

WAITS: Final = "(waits)"
"""A router's answer for a request that has to wait for a server. Only a router that is also a `Gate` may give
it.
"""


class Router(Protocol):
    """Chooses a server. Every method gets the virtual time."""

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        """Set the current servers. `restarted` names a server that came back with a cold cache, or is
        empty.
        """

    def route(self, request: SimRequest, *, now: float) -> str | None:
        """Return the server's name. None refuses the request. `WAITS` means that a `Gate` will answer
        later.
        """

    def first_token(self, request_id: int, *, now: float) -> None: ...

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None: ...

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None: ...


class Gate(Protocol):
    """Holds requests that have no server yet. It is asked after each event, and when it is due."""

    def decided(self, *, now: float) -> Iterable[tuple[int, str | None]]:
        """Return the requests that are decided now, each with its server, or with None if the request is
        refused. The fleet carries out each decision before it asks for the next.
        """

    @property
    def due_s(self) -> float:
        """Return the latest time at which the gate must be asked."""


class Workload(Protocol):
    """The arrivals. A closed loop plans a user's next request when the user's last request is over."""

    def start(self) -> Iterable[tuple[float, SimRequest]]: ...

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Servers that restart, join or leave at one moment. An empty name means no server."""

    at_s: float
    restart: str = ""
    """The name of a server whose process dies and comes back cold at once."""
    add: str = ""
    """The name of a server that joins."""
    remove: str = ""
    """The name of a server that leaves. The server gets no more requests, ends its open requests, and never
    comes back.
    """
    speed: float = 1.0
    """The speed of the server that joins or restarts, as a share of the usual speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    shape: EngineShape = field(default_factory=EngineShape)
    num_servers: int = 8
    speeds: tuple[float, ...] = ()
    """The speeds of the first servers, as shares of the usual speed. A slow pod has less than 1."""
    cache_shares: Mapping[str, float] = field(default_factory=dict)
    """The size of each server's cache, as a share of the usual size."""
    scrape_interval_s: float = 1.0
    scrape_lag_s: float = 0.0
    """The age of a page when the router gets it."""
    num_scrapers: int = 1
    """The number of picker replicas. Each scrapes the servers separately."""
    changes: tuple[Change, ...] = ()
    horizon_s: float = 3600.0
    """The run stops at this time, even if requests are unfinished."""


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    records: list[Record]
    ended_s: float
    load_cov: float
    """The mean over time of the coefficient of variation of requests inside the servers."""
    adapter_loads: int
    preemptions: int
    query_tokens: int
    hit_tokens: int


_Handler = Callable[[float], None]


class Fleet:
    def __init__(
        self,
        plan: FleetPlan,
        *,
        router: Router,
        workload: Workload,
        rng: random.Random,
        gate: Gate | None = None,
    ) -> None:
        """`gate` is the same object as the router, if requests may wait in it."""
        self._plan = plan
        self._router = router
        self._gate = gate
        self._gate_due_s = float("inf")
        self._held = 0
        self._workload = workload
        self._rng = rng
        self._events: list[tuple[float, int, _Handler]] = []
        self._num_events = 0
        self._engines: dict[str, SimEngine] = {}
        self._retired: list[SimEngine] = []
        self._records: dict[int, Record] = {}
        self._covs: list[float] = []
        self._open = 0
        self._arrivals_planned = 0

    @property
    def engines(self) -> dict[str, SimEngine]:
        """Return the engines by server name, for tests."""
        return self._engines

    def run(self) -> Outcome:
        plan = self._plan
        for index in range(plan.num_servers):
            speed = plan.speeds[index] if index < len(plan.speeds) else 1.0
            self._start_server(f"pod-{index}", speed=speed, now=0.0)
        self._router.set_servers(list(self._engines), restarted="", now=0.0)
        for change in plan.changes:
            self._at(change.at_s, self._change_of(change))
        for when, request in self._workload.start():
            self._plan_arrival(when, request)
        self._at(0.5, self._sample_load)
        now = 0.0
        while self._events and (self._open or self._arrivals_planned or self._held):
            when, _, handler = heapq.heappop(self._events)
            if when > plan.horizon_s:
                now = plan.horizon_s
                break
            now = when
            handler(now)
            if self._gate is not None:
                self._carry_out_decisions(self._gate, now)
        return self._outcome(now)

    # -- events ----------------------------------------------------------------------------------------------

    def _at(self, when: float, handler: _Handler) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, handler))

    def _plan_arrival(self, when: float, request: SimRequest) -> None:
        self._arrivals_planned += 1

        def arrive(now: float) -> None:
            self._arrivals_planned -= 1
            self._arrive(request, now)

        self._at(when, arrive)

    def _arrive(self, request: SimRequest, now: float) -> None:
        record = Record(request=request, arrived_s=now, num_prompt_tokens=request.num_prompt_tokens)
        assert request.request_id not in self._records, "a request id occurs twice"
        self._records[request.request_id] = record
        server = self._router.route(request, now=now)
        if server == WAITS:
            self._held += 1
        else:
            self._begin(record, server, now)

    def _carry_out_decisions(self, gate: Gate, now: float) -> None:
        for request_id, server in gate.decided(now=now):
            self._held -= 1
            self._begin(self._records[request_id], server, now)
        if gate.due_s < self._gate_due_s or self._gate_due_s <= now:
            self._gate_due_s = max(gate.due_s, now)
            if self._gate_due_s < float("inf"):
                self._at(self._gate_due_s, lambda _: None)  # the gate is asked after each event

    def _begin(self, record: Record, server: str | None, now: float) -> None:
        request = record.request
        if server is None:
            record.failed, record.ended_s = True, now
            self._plan_next(record, now)
            return
        record.server = server
        engine = self._engines[server]
        job = Job(
            job_id=request.request_id,
            names=block_names(
                (*request.segments, request.answer),
                block_tokens=self._plan.shape.block_tokens,
                root=request.adapter,
            ),
            num_prompt_tokens=record.num_prompt_tokens,
            num_answer_tokens=request.answer.num_tokens,
            adapter=request.adapter,
        )
        self._open += 1
        if not engine.fits(job):
            self._end(job, now, failed=True)
            return
        engine.add(job, now=now)
        self._plan_wake(engine)

    def _plan_wake(self, engine: SimEngine) -> None:
        due_s = engine.due_s

        def wake(now: float) -> None:
            if engine.due_s == due_s:  # a changed due time means that this event is stale
                first, ended = engine.wake(now)
                for job in first:
                    self._first_token(job, now)
                for job in ended:
                    self._end(job, now, failed=False)
                if engine.due_s != float("inf"):
                    self._plan_wake(engine)

        self._at(due_s, wake)

    def _first_token(self, job: Job, now: float) -> None:
        self._records[job.job_id].first_token_s = now
        self._router.first_token(job.job_id, now=now)

    def _end(self, job: Job, now: float, *, failed: bool) -> None:
        record = self._records[job.job_id]
        record.ended_s, record.failed = now, failed
        record.num_cached_tokens, record.num_preemptions = job.num_cached_tokens, job.num_preemptions
        self._open -= 1
        self._router.ended(job.job_id, failed=failed, cached_tokens=job.num_cached_tokens or 0, now=now)
        self._plan_next(record, now)

    def _plan_next(self, record: Record, now: float) -> None:
        for when, request in self._workload.after(record, now=now):
            self._plan_arrival(max(when, now), request)

    # -- servers ---------------------------------------------------------------------------------------------

    def _start_server(self, name: str, *, speed: float, now: float) -> None:
        shape = self._plan.shape
        share = self._plan.cache_shares.get(name, 1.0)
        if share != 1.0:
            shape = replace(shape, num_blocks=int(shape.num_blocks * share))
        if speed != 1.0:
            shape = replace(shape, costs=replace(shape.costs, speed=shape.costs.speed * speed))
        known = name in self._engines
        self._engines[name] = SimEngine(shape)
        if known:
            return  # the scrapes of this server go on
        for scraper in range(self._plan.num_scrapers):
            phase_s = self._rng.random() * self._plan.scrape_interval_s
            self._at(now + phase_s, self._scrape_of(scraper, name))

    def _change_of(self, change: Change) -> _Handler:
        def apply(now: float) -> None:
            if change.restart:
                old = self._engines[change.restart]
                self._retired.append(old)
                self._start_server(change.restart, speed=change.speed, now=now)
                for job in old.drop_all():
                    self._end(job, now, failed=True)
            if change.add:
                assert change.add not in self._engines, "a server of this name exists already"
                self._start_server(change.add, speed=change.speed, now=now)
            if change.remove:
                # The server's requests still end, because their events are planned already.
                self._retired.append(self._engines.pop(change.remove))
            self._router.set_servers(list(self._engines), restarted=change.restart, now=now)

        return apply

    def _scrape_of(self, scraper: int, name: str) -> _Handler:
        plan = self._plan

        def scrape(now: float) -> None:
            if name not in self._engines:
                return
            page = snapshot(self._engines[name], now=now)
            if plan.scrape_lag_s:
                self._at(now + plan.scrape_lag_s, deliver_of(page))
            else:
                self._router.scraped(scraper, name, page, now=now)
            self._at(now + plan.scrape_interval_s * self._rng.uniform(0.9, 1.1), scrape)

        def deliver_of(page: Snapshot) -> _Handler:
            return lambda now: self._router.scraped(scraper, name, page, now=now)

        return scrape

    def _sample_load(self, now: float) -> None:
        loads = [engine.num_running + engine.num_waiting for engine in self._engines.values()]
        mean = sum(loads) / len(loads)
        if mean > 0:
            variance = sum((load - mean) ** 2 for load in loads) / len(loads)
            self._covs.append(variance**0.5 / mean)
        self._at(now + 1.0, self._sample_load)

    def _outcome(self, now: float) -> Outcome:
        engines = [*self._engines.values(), *self._retired]
        for engine in engines:
            for job in engine.jobs():
                self._records[job.job_id].num_cached_tokens = job.num_cached_tokens
        return Outcome(
            records=list(self._records.values()),
            ended_s=now,
            load_cov=sum(self._covs) / len(self._covs) if self._covs else 0.0,
            adapter_loads=sum(e.counters.adapter_loads for e in engines),
            preemptions=sum(e.counters.preemptions for e in engines),
            query_tokens=sum(e.counters.query_tokens for e in engines),
            hit_tokens=sum(e.counters.hit_tokens for e in engines),
        )
