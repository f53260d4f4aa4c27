"""Compares the default rule with other rules, an oracle and a clairvoyant on small cases.

The *oracle* decides by our score when a request comes, with the truth: the servers' blocks and queues, the
times of their cost model, and the lengths of answers. The *clairvoyant* also knows the requests to come. It
is found by local search: from the best run found, one request at a time moves to another server, and stays
there if the mean TTFT of the run is less. The best assignment is at least as good.

`python -m bench.routing.bounds --workloads none,b2b`
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from statistics import fmean

from bench.routing.bench import Run, Setting, calibrate, outcome_of, plan_of, plan_runs, spec_of, work_of
from bench.routing.catalog import NEAR
from bench.routing.rows import row_of
from model_server.core.hashing import BlockHash
from model_server.sim.engine import SimEngine, Snapshot
from model_server.sim.fleet import Fleet, Outcome
from model_server.sim.prompts import block_names
from model_server.sim.request import SimRequest

_STALL, _JOIN_S = 0.15, 0.5  # k of the default rule, and the bound of its term a
_OPEN = "none,b2b,tenants,hot,conversation,lora,retrieval,fan-out,reasoning,classification,documents,bursts,forks,clock"
_SETTING = Setting(num_servers=3, scale=0.05, scrape_interval_s=1.0)


class Planned:
    """Sends each request to the server that the plan names, or to the oracle's choice if there is no plan."""

    def __init__(self, plan: Mapping[int, str] | None) -> None:
        self._plan = plan
        self.engines: Mapping[str, SimEngine] = {}
        self.arrivals_per_s = 0.0

    def route(self, request: SimRequest, *, now: float) -> str | None:
        if self._plan is not None:
            return self._plan[request.request_id]
        return min(self.engines, key=lambda n: cost_s(self.engines[n], request, self.arrivals_per_s))

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        """Do nothing, like all methods below: this router knows the servers themselves."""

    def first_token(self, request_id: int, *, now: float) -> None: ...

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None: ...

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None: ...


def cost_s(engine: SimEngine, request: SimRequest, arrivals_per_s: float) -> float:
    """Return B + U (1 + k L + a min(B, 0.5 s)). L: the requests that will be answered after the backlog."""
    size, costs = engine.shape.block_tokens, engine.shape.costs
    coming: set[BlockHash] = set()
    backlog_s = 0.0
    for job in engine.jobs():
        done = job.num_computed or size * _held(engine, job.names, coming, job.num_prompt_tokens)
        if done < job.num_prompt_tokens:
            backlog_s += costs.prefill_s(start=done, num_tokens=job.num_prompt_tokens - done)
        coming.update(job.names[: job.num_prompt_tokens // size])
    answered = sum((j.end_tokens - j.num_tokens) * costs.decode_step_s > backlog_s for j in engine.jobs())
    names = block_names(request.segments, block_tokens=size, root=request.adapter)
    tokens = request.num_prompt_tokens
    cached = size * _held(engine, names, coming, tokens)
    own_s = costs.prefill_s(start=cached, num_tokens=tokens - cached)
    delayed = _STALL * answered + arrivals_per_s * min(backlog_s, _JOIN_S)
    return (backlog_s + own_s * (1 + delayed)) / costs.speed


def _held(engine: SimEngine, names: Sequence[BlockHash], coming: set[BlockHash], tokens: int) -> int:
    """Return the leading blocks of a prompt that the server has, or will have computed before."""
    usable = (tokens - 1) // engine.shape.block_tokens
    held = (n for n, name in enumerate(names[:usable]) if not (name in coming or engine.pool.find(name)))
    return next(held, min(usable, len(names)))


def outcome_by(router: Planned, run: Run) -> Outcome:
    spec = spec_of(run.workload)
    workload, arrivals_s = work_of(run, spec)
    plan = plan_of(run.setting, spec, arrivals_s=arrivals_s)
    fleet = Fleet(plan, router=router, workload=workload, rng=random.Random(run.seed))
    router.engines = fleet.engines
    router.arrivals_per_s = run.load * run.capacity_per_s / run.setting.num_servers
    return fleet.run()


def clairvoyant_s(run: Run, outcomes: Sequence[Outcome], *, moves: int) -> float:
    """Return the mean TTFT after this many tried moves, from the best of these outcomes."""
    best = min(outcomes, key=_mean_s)
    plan, least_s = {r.request.request_id: r.server for r in best.records}, _mean_s(best)
    rng, servers = random.Random(run.seed), [f"pod-{n}" for n in range(run.setting.num_servers)]
    for _ in range(moves):
        moved = {**plan, rng.choice([*plan]): rng.choice(servers)}
        found_s = _mean_s(outcome_by(Planned(moved), run)) if moved != plan else least_s
        if found_s < least_s:
            plan, least_s = moved, found_s
    return least_s


def _mean_s(outcome: Outcome) -> float:
    return row_of(outcome).ttft_mean_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=_OPEN, metavar="A,B", help="open loops only")
    parser.add_argument("--moves", type=int, default=1000, help="moves of one request that the search tries")
    args = parser.parse_args()
    print("| workload | load | least-cost | oracle | best other | clairvoyant, s |\n" + "| --- " * 6 + "|")
    for workload in args.workloads.split(","):
        rate = {workload: calibrate(workload, _SETTING)}
        for load in (0.8, 1.2):
            found = []
            for seed in (1, 2):
                run, *others = plan_runs(
                    [workload], NEAR, loads=[load], seeds=(seed,), setting=_SETTING, capacities=rate
                )
                outcomes = [outcome_of(run), outcome_by(Planned(None), run), *map(outcome_of, others)]
                found.append([*map(_mean_s, outcomes), clairvoyant_s(run, outcomes, moves=args.moves)])
            ours_s, oracle_s, *others_s, best_s = map(fmean, zip(*found, strict=True))
            figures = " | ".join(f"{s / best_s:.2f}" for s in (ours_s, oracle_s, min(others_s)))
            print(f"| {workload} | {load} | {figures} | {best_s:.3f} |", flush=True)


if __name__ == "__main__":
    main()
