"""Runs one policy over one trace on simulated servers: the picker's own code, the model server's own
scheduling, and a virtual clock.

The simulation uses these facts of the recording: the times of requests, the common parts of their prompts,
the lengths of prompts and answers, adapters, and the servers' cache sizes and speeds. Requests come at their
recorded times, whatever happens to earlier requests (an open loop). The fleet stays as it was at the end of
the recording. Pure: the same trace and policy give the same figures.

`reading` makes the `Trace`. The benches use the router and the measures of a run too.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final, Self

from epp.base.errors import PickError
from epp.base.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import Policy
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.sim.engine import EngineShape, Snapshot
from model_server.sim.fleet import Fleet, FleetPlan, Outcome
from model_server.sim.prompts import render
from model_server.sim.request import Record, SimRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedServer:
    name: str
    capacity_tokens: int
    prefill_tokens_per_s: float


UNSTATED: Final = RecordedServer(name="server", capacity_tokens=512_000, prefill_tokens_per_s=8000.0)
"""A simulated server of which the source states nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one policy. Times are seconds. None: not known."""

    hit_ratio: float
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    counted: int
    """Number of requests in these figures."""
    failed: int
    by_server: dict[str, int]
    """All requests, by the server that got them."""

    @classmethod
    def of(cls, ttfts: Sequence[float], tpots: Sequence[float], **counts: Any) -> Self:
        """Return the figures of times in ascending order, and of `counts`, the other fields."""
        return cls(
            ttft_mean_s=fmean(ttfts) if ttfts else None,
            ttft_p50_s=quantile(ttfts, 0.5) if ttfts else None,
            ttft_p90_s=quantile(ttfts, 0.9) if ttfts else None,
            ttft_p99_s=quantile(ttfts, 0.99) if ttfts else None,
            tpot_p50_s=quantile(tpots, 0.5) if tpots else None,
            tpot_p90_s=quantile(tpots, 0.9) if tpots else None,
            **counts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What the simulation knows of a recording. It is the workload of the simulated fleet too."""

    calls: Sequence[tuple[float, SimRequest]]
    """Requests in order of time, each with the seconds since the first one."""
    servers: Sequence[RecordedServer]
    bytes_per_token: float = 4.0
    decode_step_s: float | None = None
    """Time for each token of an answer on a calm server, if sampled answers show it."""
    policy: Policy | None = None
    """The policy that routed at the end of the recording."""
    recorded: Figures | None = None
    """The figures of the recording itself. None: the load or the fleet is another one."""
    remarks: tuple[str, ...] = ()
    """What the reader should know: what was left out, and what was estimated."""

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        return self.calls

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:  # noqa: ARG002 - as the fleet calls it
        return ()

    def changed(self, *, load: float, servers: int) -> "Trace":
        """Return the trace at `load` times its rate, on this number of servers: the first ones, repeated. 0
        servers: as recorded.
        """
        if load == 1.0 and not servers:
            return self
        fleet = []
        for n in range(servers or len(self.servers)):
            copy, which = divmod(n, len(self.servers))
            server = self.servers[which]
            fleet.append(replace(server, name=f"{server.name}+{copy}") if copy else server)
        calls = [(at_s / load, request) for at_s, request in self.calls]
        return replace(self, calls=calls, servers=fleet, recorded=None)


# -- what is measured ----------------------------------------------------------------------------------------

WARM_UP_SHARE: Final = 0.1
"""The first arrivals meet cold caches everywhere, so this share of them is left out."""


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def ttft_s(record: Record, ended_s: float) -> float:
    return (record.first_token_s if record.first_token_s is not None else ended_s) - record.arrived_s


def tpot_s(record: Record) -> float | None:
    tokens = record.request.answer.num_tokens
    if not record.completed or tokens < 2 or record.first_token_s is None or record.ended_s is None:
        return None
    return (record.ended_s - record.first_token_s) / (tokens - 1)


# -- the pickers ---------------------------------------------------------------------------------------------

BASE_MODEL = "base"


@dataclass(slots=True)
class _OpenCall:
    picker: Picker
    pick: Pick
    request: SimRequest
    first_token_s: float | None = None


class PickerRouter:
    """Makes real pickers the router of a simulated fleet. A picker gets real bytes, and the pages that a
    scraper would read. Of an answer it sees what Envoy would show it: headers at once (as for a streamed
    answer, so they say nothing), the end, and for the sampled share of requests the usage. It does not see
    first tokens.

    All requests go to the first picker, unless a derived class says otherwise (`route`), as in the benches.
    """

    def __init__(
        self, pickers: list[Picker], *, adapters: frozenset[str], bytes_per_token: float = 4.0
    ) -> None:
        self.pickers = pickers
        self._adapters = adapters
        self._bytes_per_token = bytes_per_token
        self._open: dict[int, _OpenCall] = {}
        self._incarnations: dict[str, int] = {}
        self._places: dict[str, int] = {}
        """The place of each server's address. A server keeps its address when others come or go."""

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        if restarted:
            self._incarnations[restarted] = self._incarnations.get(restarted, 0) + 1
        endpoints = [
            Endpoint(
                name=EndpointName(name),
                address=self._address(name),
                model=BASE_MODEL,
                adapters=self._adapters,
                incarnation=str(self._incarnations.get(name, 0)),
            )
            for name in names
        ]
        for picker in self.pickers:
            picker.news.set_endpoints(endpoints, now=now)

    def _address(self, name: str) -> Address:
        place = self._places.setdefault(name, len(self._places))
        return Address(f"10.{place // 40_000}.{place // 200 % 200}.{place % 200 + 1}", 8000)

    def route(self, request: SimRequest, *, now: float) -> str | None:
        return self._send(request, self._pick_request(request), self.pickers[0], now=now)

    def _pick_request(self, request: SimRequest) -> Question:
        inference = InferenceRequest(
            kind=ApiKind.CHAT,
            model=request.adapter or BASE_MODEL,
            prompt=render(request.segments, bytes_per_token=self._bytes_per_token),
            stream=True,
            max_tokens=request.answer.num_tokens,
        )
        return Question(
            request_id=str(request.request_id),
            inference=inference,
            body_bytes=len(inference.prompt),
            session=request.session,
        )

    def _send(self, request: SimRequest, question: Question, picker: Picker, *, now: float) -> str | None:
        try:
            pick = picker.pick(question, now=now)
        except PickError:
            return None
        return self._begun(request, pick, picker, now=now)

    def _begun(self, request: SimRequest, pick: Pick, picker: Picker, *, now: float) -> str:
        picker.housekeep(now=now)
        self._open[request.request_id] = _OpenCall(picker, pick, request)
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
        return pick.decision.chosen

    def first_token(self, request_id: int, *, now: float) -> None:
        self._open[request_id].first_token_s = now

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        done = self._open.pop(request_id)
        if done.pick.sampled and not failed:
            feedback = ResponseFeedback(
                first_token_at=done.first_token_s,
                prompt_tokens=done.request.num_prompt_tokens,
                cached_tokens=cached_tokens,
                completion_tokens=done.request.answer.num_tokens,
            )
            done.picker.on_feedback(done.pick, feedback, now=now)
        done.picker.end(done.pick, outcome="failed" if failed else "ended", now=now)

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        counters = page.counters
        metrics = EndpointMetrics(
            scraped_at=now,  # a scraper knows when a page came, not how old the page is
            running=page.running,
            waiting=page.waiting,
            kv_usage=page.kv_usage,
            capacity_tokens=page.shape.capacity_tokens,
            block_size=page.shape.block_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_queries=counters.query_tokens,
            prefix_hits=counters.hit_tokens,
            finished=counters.finished,
            ttft_sum_s=counters.ttft_sum_s,
            ttft_count=counters.ttft_count,
            max_lora=page.shape.limits.max_loras,
            active_adapters=page.active_adapters,
        )
        self.pickers[scraper].news.observe(EndpointName(server), metrics, now=now)


# -- the run -------------------------------------------------------------------------------------------------

_GRACE_S: Final = 60.0
"""The run goes on for this long after the last arrival."""
_NO_KNEE: Final = 1e12
"""A context that no prompt reaches."""
_BLOCK_TOKENS: Final = 64
"""Block size of the simulated caches: about as long as a piece, so that neither is finer than the other."""


def run(trace: Trace, policy: Policy) -> Figures:
    router = PickerRouter(
        [Picker(policy, rng=random.Random(1000))],
        adapters=frozenset(request.adapter for _, request in trace.calls if request.adapter),
        bytes_per_token=trace.bytes_per_token,
    )
    outcome = Fleet(_plan_of(trace), router=router, workload=trace, rng=random.Random(1)).run()
    return _figures_of(outcome, trace.servers)


def _plan_of(trace: Trace) -> FleetPlan:
    """Return the plan of the fleet. It has the cache size and the prefill rate of each server as a share of
    the first server's.

    The rate that a picker learns is a mean over all places of a prompt, beside answers. So the simulated
    servers compute each token at this rate.
    """
    servers, first = trace.servers, trace.servers[0]
    costs = CostModel(
        prefill_tokens_per_s=first.prefill_tokens_per_s, context_knee_tokens=_NO_KNEE, interference=0.0
    )
    if trace.decode_step_s is not None:
        costs = replace(costs, decode_step_s=trace.decode_step_s)
    return FleetPlan(
        shape=EngineShape(
            num_blocks=max(1, first.capacity_tokens // _BLOCK_TOKENS),
            block_tokens=_BLOCK_TOKENS,
            limits=SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=2048, max_loras=4),
            costs=costs,
        ),
        num_servers=len(servers),
        speeds=tuple(s.prefill_tokens_per_s / first.prefill_tokens_per_s for s in servers),
        cache_shares={f"pod-{n}": s.capacity_tokens / first.capacity_tokens for n, s in enumerate(servers)},
        horizon_s=trace.calls[-1][0] + _GRACE_S,
    )


def _figures_of(outcome: Outcome, servers: Sequence[RecordedServer]) -> Figures:
    """Return the figures of a run. The first tenth of the requests meets cold caches and counts only in
    the requests of each server.
    """
    ordered = sorted(outcome.records, key=lambda record: record.arrived_s)
    records = ordered[int(WARM_UP_SHARE * len(ordered)) :]
    ttfts = sorted(ttft_s(record, outcome.ended_s) for record in records)
    tpots = sorted(t for t in map(tpot_s, records) if t is not None)
    seen = [record for record in records if record.num_cached_tokens is not None]
    prompt = sum(record.num_prompt_tokens for record in seen)
    names = {f"pod-{n}": server.name for n, server in enumerate(servers)}
    got = Counter(names[record.server] for record in ordered if record.server)
    return Figures.of(
        ttfts,
        tpots,
        hit_ratio=sum(record.num_cached_tokens or 0 for record in seen) / prompt if prompt else 0.0,
        counted=len(records),
        failed=sum(not record.completed for record in records),
        by_server={server.name: got[server.name] for server in servers},
    )
