"""Compares separate prefill and decode servers with the same servers doing both, on long prompts: `python -m
bench.routing.disaggregation`.

The picker's own code decides. The servers are simulated, and the transfer takes as long as the policy says. A
prefill server computes a prompt and one token. Then its blocks go to the decode server, which computes the
rest of the last block. Prints a table.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from msgspec.structs import replace as with_fields

from bench.routing.bench import CACHE_TOKENS, GRACE_S
from bench.routing.picker_router import PickerRouter
from bench.routing.workloads import OpenLoop, Timed, length, made_request
from epp.config.disaggregation import Disaggregation
from epp.config.policy import DEFAULT_POLICY, Policy
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.replay.measure import WARM_UP_SHARE, quantile, tpot_s, ttft_s
from epp.scheduling.disaggregation import transfer_s
from epp.types import Endpoint, Role
from model_server.core.hashing import BlockHash
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.sim.engine import EngineShape, SimEngine
from model_server.sim.fleet import Fleet, FleetPlan, Outcome
from model_server.sim.job import Job
from model_server.sim.prompts import Segment, block_names
from model_server.sim.request import Record, SimRequest

SHARED_IDS = 1 << 50
BLOCK_TOKENS = 128
SERVERS = 8
COUNT = 1500


class ApartRouter(PickerRouter):
    """Runs the picker in front of servers. The first `prefillers` servers only compute prompts."""

    def __init__(self, policy: Policy, *, seed: int, prefillers: int) -> None:
        super().__init__(policy, seed=seed)
        self._prefillers = prefillers
        self._helpers: dict[int, tuple[str, float]] = {}

    def _endpoints_of(self, names: Sequence[str]) -> list[Endpoint]:
        return [
            replace(endpoint, role=Role.PREFILL) if n < self._prefillers else endpoint
            for n, endpoint in enumerate(super()._endpoints_of(names))
        ]

    def _begun(self, request: SimRequest, pick: Pick, picker: Picker, *, now: float) -> str:
        helper = pick.decision.prefill
        if helper is not None:
            self._helpers[request.request_id] = (helper.name, helper.transfer_s)
        return super()._begun(request, pick, picker, now=now)

    def helper(self, request_id: int) -> tuple[str, float] | None:
        """Return the server that computes the prompt, and how long the transfer of its blocks takes."""
        return self._helpers.pop(request_id, None)


class ApartFleet(Fleet):
    """A fleet in which the router gives each request to two servers."""

    def __init__(self, plan: FleetPlan, *, router: ApartRouter, workload: OpenLoop, seed: int) -> None:
        super().__init__(plan, router=router, workload=workload, rng=random.Random(seed))
        self._apart = router
        self._prefilling: dict[int, tuple[Record, str, float]] = {}
        self.moved = 0

    def _begin(self, record: Record, server: str | None, now: float) -> None:
        request = record.request
        helped = self._apart.helper(request.request_id) if server is not None else None
        if server is None or helped is None:
            super()._begin(record, server, now)
            return
        helper, moving_s = helped
        job = Job(
            job_id=-1 - request.request_id,
            names=self._names(request.segments),
            num_prompt_tokens=record.num_prompt_tokens,
            num_answer_tokens=1,
        )
        self.moved += 1
        self._open += 1
        self._prefilling[job.job_id] = (record, server, moving_s)
        self.engines[helper].add(job, now=now)
        self._plan_wake(self.engines[helper])

    def _names(self, segments: Sequence[Segment]) -> list[BlockHash]:
        return block_names(segments, block_tokens=BLOCK_TOKENS)

    def _first_token(self, job: Job, now: float) -> None:
        if job.job_id not in self._prefilling:
            super()._first_token(job, now)

    def _end(self, job: Job, now: float, *, failed: bool) -> None:
        prefilled = self._prefilling.pop(job.job_id, None)
        if prefilled is None:
            super()._end(job, now, failed=failed)
            return
        record, server, moving_s = prefilled
        self._at(now + moving_s, lambda then: self._arrived(job, record, server, then))

    def _arrived(self, job: Job, record: Record, server: str, now: float) -> None:
        self._open -= 1
        take_in(self.engines[server], job.names[: (record.num_prompt_tokens - 1) // BLOCK_TOKENS])
        self._apart.answered(record.request.request_id, now=now)
        super()._begin(record, server, now)


def take_in(engine: SimEngine, names: Sequence[BlockHash]) -> None:
    """Add blocks that came from another server."""
    known = []
    for name in names:
        block = engine.pool.find(name)
        if block is None:
            break
        known.append(block)
    engine.pool.hold(known)
    new = engine.pool.take(min(len(names) - len(known), engine.pool.num_free))
    for name, block in zip(names[len(known) :], new, strict=False):
        engine.pool.cache(block, name)
    engine.pool.release([*known, *new])


def long_prompts(rng: random.Random, count: int) -> list[Timed]:
    """Return prompts of 12,000 tokens on average, of which the first 2,000 are one of 20 beginnings. Answers
    have 200 tokens.
    """
    return [
        Timed(
            rng.expovariate(1),
            made_request(
                n,
                (Segment(SHARED_IDS + rng.randrange(20), 2000),),
                length(rng, mean=10_000, sigma=0.7, least=1000, most=60_000),
                length(rng, mean=200, sigma=0.7, least=16, most=1000),
            ),
        )
        for n in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    good: float
    """The share of requests whose first token came within 5 s, and each later token within 50 ms."""
    moved: float
    """The share of requests whose prompt another server computed."""


def run(*, prefillers: int, rate_per_s: float, seed: int, count: int, settings: Disaggregation) -> Figures:
    policy = policy_of_prefill(settings)
    workload = OpenLoop(long_prompts(random.Random(f"long {seed}"), count), rate_per_s=rate_per_s)
    shape = EngineShape(
        num_blocks=CACHE_TOKENS // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        limits=SchedulerLimits(max_num_seqs=128, max_num_batched_tokens=2048, max_loras=4),
        costs=CostModel(decode_step_s=0.008, decode_per_request_s=0.0001),
    )
    plan = FleetPlan(shape=shape, num_servers=SERVERS, horizon_s=workload.last_arrival_s + GRACE_S)
    router = ApartRouter(policy, seed=seed, prefillers=prefillers)
    fleet = ApartFleet(plan, router=router, workload=workload, seed=seed)
    return figures_of(fleet.run(), moved=fleet.moved / count)


def policy_of_prefill(settings: Disaggregation) -> Policy:
    return with_fields(DEFAULT_POLICY, spec=with_fields(DEFAULT_POLICY.spec, disaggregation=settings))


def figures_of(outcome: Outcome, *, moved: float) -> Figures:
    ordered = sorted(outcome.records, key=lambda r: r.arrived_s)
    records = ordered[int(WARM_UP_SHARE * len(ordered)) :]
    ttfts = sorted(ttft_s(r, outcome.ended_s) for r in records)
    tpots = sorted(t for t in map(tpot_s, records) if t is not None)
    good = sum(
        r.completed and ttft_s(r, outcome.ended_s) <= 5.0 and (tpot_s(r) or 0.0) <= 0.05 for r in records
    )
    return Figures(
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p90_s=quantile(ttfts, 0.9),
        tpot_p50_s=quantile(tpots, 0.5),
        tpot_p90_s=quantile(tpots, 0.9),
        good=good / len(records),
        moved=moved,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing.disaggregation", description=__doc__)
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[2.0, 3.0], help="requests per second for all 8 servers"
    )
    parser.add_argument(
        "--prefillers",
        nargs="+",
        type=int,
        default=[0, 4, 5, 6],
        help="number of prefill servers among the 8; 0: every server does both",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2], help="seeds to run (default 1 2)")
    parser.add_argument("--count", type=int, default=COUNT, help="number of requests in a run")
    parser.add_argument("--bandwidth", type=float, default=1e10, help="bytes per second of a transfer")
    args = parser.parse_args(argv)
    settings = Disaggregation(transfer_bytes_per_second=args.bandwidth)
    print(f"A transfer of 12,000 tokens takes {transfer_s(12_000, settings):.2f} s.\n")
    print("| requests/s | servers | TTFT p50 | TTFT p90 | time per token p50 | p90 | good | prompts moved |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for rate in args.rates:
        for prefillers in args.prefillers:
            rows = [
                run(prefillers=prefillers, rate_per_s=rate, seed=seed, count=args.count, settings=settings)
                for seed in args.seeds
            ]
            print(line_of(rate, prefillers, rows), flush=True)


def line_of(rate: float, prefillers: int, rows: Sequence[Figures]) -> str:
    def mean(name: str) -> float:
        return fmean(getattr(row, name) for row in rows)

    servers = (
        f"{prefillers} prefill, {SERVERS - prefillers} decode" if prefillers else f"{SERVERS} that do both"
    )
    cells = [
        f"{rate:g}",
        servers,
        *(f"{mean(name):.2f} s" for name in ("ttft_p50_s", "ttft_p90_s")),
        *(f"{1000 * mean(name):.0f} ms" for name in ("tpot_p50_s", "tpot_p90_s")),
        f"{mean('good'):.0%}",
        f"{mean('moved'):.0%}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
