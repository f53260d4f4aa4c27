"""Simulates row 001-7, a serving load with a shared start, and the other half of row 001-8, with the block
cache and without.

There are 500 requests of 336 shared and 560 own tokens (the document's 330 and 550, in whole blocks of 16),
with 150 answered tokens and Poisson arrivals at several rates. They go to one server with the cost model's
sizes: an 8B model on one data-centre GPU, or, with `--cost`, the sizes that `model-server calibrate` found
for a real server. "Without the cache" means that every request has its own start. Times come from the model
and are not measured; hits are exact.

`python -m bench.model_server.bench_serving` takes seconds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bench.routing.workloads import OpenLoop, Timed
from bench.tables import show, write_json
from model_server.calibrate.cost_file import read_costs
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Fleet, FleetPlan
from model_server.sim.prompts import Segment
from model_server.sim.request import Record, SimRequest
from model_server.sim.snapshot import Snapshot

SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS, REQUESTS = 336, 560, 150, 500
_DEFAULT_COSTS = CostModel()


class OneServer:
    """Sends every request to the only server."""

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        [self._name] = names

    def route(self, request: SimRequest, *, now: float) -> str | None:
        return self._name

    def first_token(self, request_id: int, *, now: float) -> None: ...

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None: ...

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None: ...


def requests(*, shared: bool, seed: int) -> list[Timed]:
    rng = random.Random(seed)
    return [
        Timed(
            rng.expovariate(1),
            SimRequest(
                request_id=n,
                segments=(
                    Segment(1 if shared else 10 + 3 * n, SHARED_TOKENS),
                    Segment(11 + 3 * n, OWN_TOKENS),
                ),
                answer=Segment(12 + 3 * n, ANSWER_TOKENS),
            ),
        )
        for n in range(REQUESTS)
    ]


def serve(*, rate_per_s: float, shared: bool, seed: int, costs: CostModel = _DEFAULT_COSTS) -> list[Record]:
    shape = EngineShape(
        num_blocks=16_384,
        block_tokens=16,
        limits=SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=2048),
        costs=costs,
    )
    workload = OpenLoop(requests(shared=shared, seed=seed), rate_per_s=rate_per_s)
    plan = FleetPlan(shape=shape, num_servers=1, horizon_s=1e6)
    return Fleet(plan, router=OneServer(), workload=workload, rng=random.Random(seed)).run().records


def ttft_s(records: Sequence[Record]) -> float:
    return fmean(r.first_token_s - r.arrived_s for r in records if r.first_token_s is not None)


def tpot_ms(records: Sequence[Record]) -> float:
    done = [r for r in records if r.completed and r.first_token_s is not None and r.ended_s is not None]
    return 1000 * fmean((r.ended_s - r.first_token_s) / (ANSWER_TOKENS - 1) for r in done)  # type: ignore[operator]  # filtered above


def hit_share(records: Sequence[Record]) -> float:
    return sum(r.num_cached_tokens or 0 for r in records) / sum(r.num_prompt_tokens for r in records)


def rows(
    rates: Sequence[float], *, seeds: Sequence[int], costs: CostModel = _DEFAULT_COSTS
) -> list[list[float]]:
    """Return for each rate the hits, TTFT with and without the cache and their ratio, and the same for TPOT.
    All values are means over the seeds.
    """
    lines = []
    for rate in rates:
        on = [serve(rate_per_s=rate, shared=True, seed=seed, costs=costs) for seed in seeds]
        off = [serve(rate_per_s=rate, shared=False, seed=seed, costs=costs) for seed in seeds]
        times = [fmean(map(ttft_s, side)) for side in (on, off)]
        steps = [fmean(map(tpot_ms, side)) for side in (on, off)]
        lines.append(
            [rate, fmean(map(hit_share, on)), *times, times[0] / times[1], *steps, steps[0] / steps[1]]
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[4.0, 6.0, 7.0, 8.0, 9.0], help="requests/s of the runs"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the requests")
    parser.add_argument(
        "--cost", type=Path, help="file with the costs of a real server, from `model-server calibrate`"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    costs = read_costs(args.cost) if args.cost else _DEFAULT_COSTS
    columns = (
        *("requests/s", "hits"),
        *("TTFT s with the cache", "TTFT s without", "TTFT ratio"),
        *("TPOT ms with the cache", "TPOT ms without", "TPOT ratio"),
    )
    found = rows(args.rates, seeds=args.seeds, costs=costs)
    show("**001-7**, simulated: 500 requests, 336 shared + 560 own tokens, 150 answered", columns, found)
    write_json(args.json, [dict(zip(columns, row, strict=False)) for row in found])


if __name__ == "__main__":
    main()
