"""Measures what exact mode gains over the approximate table in the simulated fleet. The picker gets the block
events of the simulated servers.

The real knowledge of `epp.kvevents` gets every block that a simulated server stores or drops, and every
routed prompt, a tenth of a second late. The simulator has no tokens, so the names of blocks are its own. Each
situation is run twice with the same requests. The situations are: servers that state the size of their
caches; servers that do not state it, with a wrong first belief of the picker; caches of a quarter of the size
(eviction pressure); and a picker that restarts half-way and has to learn everything again. Prints a table and
writes JSON; see `--help`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median

import msgspec

from bench.routing.bench import CACHE_TOKENS, Setting, calibrate, plan_of, spec_of
from bench.routing.picker_router import PickerRouter
from bench.routing.workloads import OpenLoop
from epp.config.policy import DEFAULT_POLICY, Policy
from epp.kvevents.block_hashes import BlockName
from epp.kvevents.chunks import MappedPrompt
from epp.kvevents.decoding import Event, Removed, Stored
from epp.kvevents.knowledge import Knowledge
from epp.kvevents.mapping import chunk_ends, whole_blocks
from epp.picker.picker import Picker
from epp.prefix_index.kv_reports import Tier
from epp.replay.picker_router import metrics_of
from epp.types import EndpointName
from model_server.core.block_pool import Block, BlockPool
from model_server.core.hashing import BlockHash
from model_server.sim.fleet import Fleet, FleetPlan
from model_server.sim.prompts import block_names
from model_server.sim.request import SimRequest
from model_server.sim.snapshot import Snapshot

_WARM_UP_S = 150.0
_MEASURED_S = 150.0
_EVENTS_LATE_S = 0.1
_BYTES_PER_TOKEN = 4
_SITUATIONS = ("stated size", "belief x 0.25", "belief x 4", "small caches", "picker restart")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    workload: str
    situation: str
    exact: bool
    seed: int
    load: float
    capacity_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    trial: Trial
    ttft_mean_s: float
    ttft_p90_s: float
    hit_ratio: float
    precision: float
    """The share of the predicted tokens that were cached. Predicted tokens are the tokens expected in the
    cache of the chosen server.
    """
    recall: float
    """The share of the cached tokens that were predicted."""


class _ReportingPool(BlockPool):
    """Records as events which blocks the pool begins to hold, and which blocks it forgets."""

    def __init__(self, num_blocks: int, events: list[Event]) -> None:
        super().__init__(num_blocks, on_forget=self._forgotten)
        self._events = events

    def cache(self, block: Block, block_hash: BlockHash, *, prefix_blocks: int = 0) -> None:
        super().cache(block, block_hash, prefix_blocks=prefix_blocks)
        self._events.append(Stored((block_name(block_hash),), Tier.GPU))

    def _forgotten(self, block: Block) -> None:
        assert block.block_hash is not None
        self._events.append(Removed((block_name(block.block_hash),), Tier.GPU))


class ReportingFleet(Fleet):
    """Keeps the events of its engines in `events`, by server, until the router takes them."""

    events: dict[str, list[Event]]

    def _start_server(self, name: str, *, speed: float, now: float) -> None:
        super()._start_server(name, speed=speed, now=now)
        engine = self._engines[name]
        engine.pool = _ReportingPool(engine.shape.num_blocks, self.events.setdefault(name, []))


class ExactRouter(PickerRouter):
    """The picker with the events of its servers. Without `knowledge` it only records its predictions."""

    def __init__(self, trial: Trial, *, policy: Policy, block_tokens: int) -> None:
        super().__init__(policy, seed=trial.seed)
        self._trial = trial
        self._policy = policy
        self._block_tokens = block_tokens
        self.knowledge = _new_knowledge() if trial.exact else None
        self.events: dict[str, list[Event]] = {}
        self._late: deque[tuple[float, EndpointName, Sequence[Event]]] = deque()
        self._prompts: deque[tuple[float, SimRequest, str]] = deque()
        self._kept: dict[EndpointName, dict[BlockName, int]] = {}
        """The blocks of each server, for the replay that a new picker gets."""
        self._restart_at = _WARM_UP_S if trial.situation == "picker restart" else float("inf")
        self._predicted: dict[int, int] = {}
        self.predictions: list[tuple[float, int, int]] = []
        """For each request that ended: the time, the predicted cached tokens, and the cached tokens."""

    def advance(self, now: float) -> None:
        super().advance(now)
        for server, events in self.events.items():
            if events:
                self._late.append((now + _EVENTS_LATE_S, EndpointName(server), tuple(events)))
                events.clear()
        if now >= self._restart_at:
            self._restart_at = float("inf")
            self._restart(now)
        if self.knowledge is None:
            self._late.clear()
            return
        while self._prompts and self._prompts[0][0] <= now:
            self._take_events(self.knowledge, until=self._prompts[0][0])
            _, request, server = self._prompts.popleft()
            self._map(self.knowledge, request, server, now=now)
        self._take_events(self.knowledge, until=now)
        self.pickers[0].take_in(self.knowledge.findings(now=now))

    def _take_events(self, knowledge: Knowledge, *, until: float) -> None:
        while self._late and self._late[0][0] <= until:
            at, server, events = self._late.popleft()
            kept = self._kept.setdefault(server, {})
            for event in events:
                _keep(kept, event)
                knowledge.apply(server, event, now=at)

    def _map(self, knowledge: Knowledge, request: SimRequest, server: str, *, now: float) -> None:
        picker = self.pickers[0]
        names = block_names(request.segments, block_tokens=self._block_tokens, root=request.adapter)
        chain = picker.caches.chain(self._inference(request))
        ends = chunk_ends(picker.caches.schedule, len(chain))
        held = whole_blocks(
            ends, bytes_per_token=_BYTES_PER_TOKEN, block_tokens=self._block_tokens, blocks=len(names)
        )
        prompt = MappedPrompt(chain, ends, [block_name(name) for name in names], held)
        knowledge.map(prompt, server=EndpointName(server), now=now)

    def _restart(self, now: float) -> None:
        """Replace the picker by a new one.

        Its exact mode gets the servers' replays, and has seen no prompt.
        """
        old = self.pickers[0]
        new = Picker(self._policy, rng=random.Random(self._trial.seed + 7))
        new.set_endpoints(old.endpoints(), now=now)
        self.pickers[0] = new
        if self.knowledge is not None:
            self._prompts.clear()
            self.knowledge = _new_knowledge()
            self._follow([e.name for e in old.endpoints()])
            for server, kept in self._kept.items():
                for block, copies in kept.items():
                    self.knowledge.apply(server, Stored((block,) * copies, Tier.GPU), now=now)

    def _follow(self, names: Iterable[EndpointName]) -> None:
        assert self.knowledge is not None
        for name in names:
            self.knowledge.add(name)
            self.knowledge.servers[name].complete = True
            self.knowledge.servers[name].trusted = True

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        super().set_servers(names, restarted=restarted, now=now)
        if self.knowledge is not None:
            self._follow([EndpointName(name) for name in names])

    def route(self, request: SimRequest, *, now: float) -> str | None:
        chosen = super().route(request, now=now)
        if chosen is not None:
            self._predicted[request.request_id] = self._open[request.request_id].pick.decision.matched_tokens
            self._prompts.append((now + _EVENTS_LATE_S, request, chosen))
        return chosen

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        predicted = self._predicted.pop(request_id)
        if not failed:
            self.predictions.append((now, predicted, cached_tokens))
        super().ended(request_id, failed=failed, cached_tokens=cached_tokens, now=now)

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        self.advance(now)
        metrics = metrics_of(page, read_at_s=now)
        if self._trial.situation.startswith("belief"):
            metrics = replace(metrics, capacity_tokens=None)
        self.pickers[scraper].observe(EndpointName(server), metrics, now=now)


def _new_knowledge() -> Knowledge:
    return Knowledge(max_blocks=10**7, max_chunks=10**6)


def block_name(name: BlockHash) -> BlockName:
    return BlockName(int.from_bytes(name, "big"))


def _keep(kept: dict[BlockName, int], event: Event) -> None:
    if isinstance(event, Stored):
        kept[event.blocks[0]] = kept.get(event.blocks[0], 0) + 1
    elif isinstance(event, Removed):
        left = kept.pop(event.blocks[0]) - 1
        if left:
            kept[event.blocks[0]] = left


def _policy_of(trial: Trial) -> Policy:
    if not trial.situation.startswith("belief"):
        return DEFAULT_POLICY
    tokens = int(float(trial.situation.rpartition(" ")[2]) * CACHE_TOKENS)
    spec = DEFAULT_POLICY.spec
    table = msgspec.structs.replace(spec.table, default_capacity_tokens=tokens)
    return msgspec.structs.replace(DEFAULT_POLICY, spec=msgspec.structs.replace(spec, table=table))


def _plan_of(trial: Trial, *, arrivals_s: float) -> FleetPlan:
    plan = plan_of(Setting(), spec_of(trial.workload), arrivals_s=arrivals_s)
    if trial.situation != "small caches":
        return plan
    return replace(plan, shape=replace(plan.shape, num_blocks=plan.shape.num_blocks // 4))


def run(trial: Trial) -> Found:
    spec = spec_of(trial.workload)
    assert spec.make is not None, "an open loop"
    rate = trial.load * trial.capacity_per_s
    count = int(rate * (_WARM_UP_S + _MEASURED_S))
    workload = OpenLoop(spec.make(random.Random(f"{spec.name} {trial.seed}"), count), rate_per_s=rate)
    plan = _plan_of(trial, arrivals_s=workload.last_arrival_s)
    router = ExactRouter(trial, policy=_policy_of(trial), block_tokens=plan.shape.block_tokens)
    fleet = ReportingFleet(plan, router=router, workload=workload, rng=random.Random(trial.seed))
    fleet.events = router.events
    outcome = fleet.run()
    until = _WARM_UP_S + (60.0 if trial.situation == "picker restart" else _MEASURED_S)
    late = [r for r in outcome.records if _WARM_UP_S <= r.arrived_s < until]
    ttft = sorted(
        (r.first_token_s if r.first_token_s is not None else outcome.ended_s) - r.arrived_s for r in late
    )
    books = [(predicted, cached) for at, predicted, cached in router.predictions if _WARM_UP_S <= at < until]
    agreed = sum(min(predicted, cached) for predicted, cached in books)
    return Found(
        trial=trial,
        ttft_mean_s=fmean(ttft),
        ttft_p90_s=ttft[int(0.9 * len(ttft))],
        hit_ratio=sum(r.num_cached_tokens or 0 for r in late) / sum(r.num_prompt_tokens for r in late),
        precision=agreed / max(1, sum(predicted for predicted, _ in books)),
        recall=agreed / max(1, sum(cached for _, cached in books)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--workloads", nargs="+", default=["b2b", "hot", "conversation"], help="workloads to run"
    )
    parser.add_argument(
        "--situations",
        nargs="+",
        default=list(_SITUATIONS),
        choices=_SITUATIONS,
        help="situations to run (default: all)",
    )
    parser.add_argument(
        "--loads", nargs="+", type=float, default=[0.9], help="loads, as shares of the capacity"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds to run (default 1 2 3)"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="number of runs at the same time (default %(default)s)"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args(argv)
    capacities = {workload: calibrate(workload, Setting())[0] for workload in args.workloads}
    trials = [
        Trial(
            workload=workload,
            situation=situation,
            exact=exact,
            seed=seed,
            load=load,
            capacity_per_s=capacities[workload],
        )
        for workload in args.workloads
        for load in args.loads
        for situation in args.situations
        for seed in args.seeds
        for exact in (False, True)
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        found = list(pool.map(run, trials))
    print(table_of(found))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:  # noqa: PTH123 - a path or /dev/stdout
            json.dump([asdict(one) for one in found], file, indent=1)


def table_of(found: Sequence[Found]) -> str:
    """Return a line for each workload, load and situation: means over the seeds, approximate and exact.
    Ratios are taken for each seed, and their median is shown.
    """
    by_cell: dict[tuple[str, float, str], dict[bool, list[Found]]] = {}
    for one in found:
        t = one.trial
        by_cell.setdefault((t.workload, t.load, t.situation), {False: [], True: []})[t.exact].append(one)
    lines = [
        "| workload | load | situation | hit rate | precision | recall | mean TTFT s | exact / approximate, TTFT mean | p90 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (workload, load, situation), cell in by_cell.items():
        columns = [
            " → ".join(f"{fmean(getattr(f, name) for f in cell[exact]):{form}}" for exact in (False, True))
            for name, form in (
                ("hit_ratio", ".3f"),
                ("precision", ".3f"),
                ("recall", ".3f"),
                ("ttft_mean_s", ".3f"),
            )
        ]
        pairs = list(zip(cell[False], cell[True], strict=True))
        mean = median(b.ttft_mean_s / a.ttft_mean_s for a, b in pairs)
        p90 = median(b.ttft_p90_s / a.ttft_p90_s for a, b in pairs)
        lines.append(
            f"| {workload} | {load} | {situation} | {' | '.join(columns)} | {mean:.2f} | {p90:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
