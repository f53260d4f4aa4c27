"""Simulates very many servers behind several pickers that share, for some seconds of virtual time.

Prints what users get: time to the first token, hits, spread of load. The pickers are the real ones and the
servers are simulated. Pickers send reports every 50 ms, and the others have read them after the
same time again. `make bench-sharing` measures what reports cost.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Final

from bench.routing.bench import GRACE_S, Setting, plan_of, saturation
from bench.routing.catalog import BY_NAME, policy_of_config
from bench.routing.more_workloads import MANY_SERVERS, MORE
from bench.routing.picker_router import PickerRouter, Shared
from bench.routing.rows import Row, row_of
from bench.routing.workloads import OpenLoop
from model_server.sim.fleet import Fleet

_FLUSH_S: Final = 0.05


def run(pickers: int, *, share: bool, servers: int, rate_per_s: float, seconds: float) -> tuple[Row, float]:
    """Make one run. Return its figures, and the bytes that were sent to other pickers for each request."""
    spec = MORE[MANY_SERVERS]
    assert spec.make is not None
    workload = OpenLoop(spec.make(random.Random(1), int(rate_per_s * seconds)), rate_per_s=rate_per_s)
    plan = plan_of(Setting(num_servers=servers), spec, arrivals_s=workload.last_arrival_s)
    plan = replace(plan, num_scrapers=pickers, horizon_s=workload.last_arrival_s + GRACE_S)
    router = PickerRouter(policy_of_config(BY_NAME["least-cost"]), seed=1, replicas=pickers)
    if share and pickers > 1:
        router.shared = Shared(router.pickers, delay_s=_FLUSH_S, flush_s=_FLUSH_S)
    outcome = Fleet(plan, router=router, workload=workload, rng=random.Random(1)).run()
    bytes_sent = router.shared.sent_bytes / len(outcome.records) if router.shared is not None else 0.0
    return row_of(outcome), bytes_sent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing.scale", description=__doc__)
    add = parser.add_argument
    add("--servers", type=int, default=1000, metavar="N", help="number of servers (default %(default)s)")
    add("--rate", type=float, default=10_000.0, metavar="R", help="requests a second (default %(default)s)")
    add("--seconds", type=float, default=10.0, metavar="S", help="seconds of arrivals (default %(default)s)")
    add("--pickers", default="1,2,4,8,16", metavar="A,B", help="numbers of pickers (default %(default)s)")
    add("--apart", action="store_true", help="also run pickers that do not share")
    args = parser.parse_args()
    most = saturation(MANY_SERVERS, Setting())[0] * args.servers / 8
    print(f"{args.rate:.0f} requests/s are {args.rate / most:.2f} of saturation, by a fleet of 8\n")
    print("| pickers | TTFT mean / p90 s | hits | load CoV | completed | bytes sent |")
    print("| --- | --- | --- | --- | --- | --- |")
    for pickers in map(int, args.pickers.split(",")):
        for share in (True, False) if args.apart and pickers > 1 else (True,):
            row, sent = run(
                pickers, share=share, servers=args.servers, rate_per_s=args.rate, seconds=args.seconds
            )
            print(
                f"| {pickers}{'' if share else ' apart'} | {row.ttft_mean_s:.3f} / {row.ttft_p90_s:.3f} "
                f"| {row.hit_ratio:.3f} | {row.load_cov:.2f} | {row.completed:.3f} | {sent:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
