"""Simulates very many servers behind several pickers that share, for some seconds of virtual time.

Prints what users get (time to the first token, hits, spread of load) and what the pickers' own work costs on
this machine: picking and booking, reading pages, sending reports to other pickers, and receiving theirs. The
pickers are the real ones and the servers are simulated. Pickers send reports every 50 ms (`--flush`), and the
others have read them after the same time again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from xxhash import xxh3_64_intdigest

from bench.routing.bench import GRACE_S, Setting, plan_of, saturation
from bench.routing.catalog import BY_NAME, policy_of_config
from bench.routing.more_workloads import MANY_SERVERS, MORE
from bench.routing.picker_router import PickerRouter
from bench.routing.rows import Row, row_of
from bench.routing.shared import Shared
from bench.routing.workloads import OpenLoop
from epp.picker.picker import Picker
from model_server.sim.fleet import Fleet
from model_server.sim.prompts import render
from model_server.sim.request import SimRequest
from model_server.sim.snapshot import Snapshot


@dataclass(slots=True)
class Meter:
    """Counts CPU seconds by kind of work. Work inside other work counts only as its own kind."""

    clock: Callable[[], float] = time.process_time
    spent_s: dict[str, float] = field(default_factory=dict)
    _on: list[str] = field(default_factory=list)
    _since_s: float = 0.0

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        self._charge()
        self._on.append(what)
        try:
            yield
        finally:
            self._charge()
            self._on.pop()

    def _charge(self) -> None:
        now_s = self.clock()
        if self._on:
            what = self._on[-1]
            self.spent_s[what] = self.spent_s.get(what, 0.0) + now_s - self._since_s
        self._since_s = now_s


class MeteredShared(Shared):
    def __init__(self, pickers: Sequence[Picker], meter: Meter, *, flush_s: float) -> None:
        super().__init__(pickers, delay_s=flush_s, flush_s=flush_s)
        self._meter = meter

    def advance(self, now: float) -> None:
        with self._meter.on("send"):
            super().advance(now)

    def _deliver(self, now: float) -> None:
        with self._meter.on("receive"):
            super()._deliver(now)


@dataclass(frozen=True, slots=True)
class Pool:
    """The pickers of one run."""

    rule: str
    pickers: int
    share: bool = True
    flush_s: float = 0.05
    by_prompt: bool = False
    """All requests with the same system prompt go to the same picker, in place of a random picker."""


class MeteredRouter(PickerRouter):
    """Routes by several pickers, and times their work."""

    def __init__(self, pool: Pool, meter: Meter) -> None:
        super().__init__(policy_of_config(BY_NAME[pool.rule]), seed=1, replicas=pool.pickers)
        self._meter = meter
        self._by_prompt = pool.by_prompt
        if pool.share and pool.pickers > 1:
            self.shared = MeteredShared(self.pickers, meter, flush_s=pool.flush_s)

    def _picker_for(self, request: SimRequest) -> Picker:
        if not self._by_prompt:
            return super()._picker_for(request)
        root = render(request.segments[:1])
        return self.pickers[xxh3_64_intdigest(root) % len(self.pickers)]

    def route(self, request: SimRequest, *, now: float) -> str | None:
        with self._meter.on("pick"):
            return super().route(request, now=now)

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        with self._meter.on("end"):
            super().ended(request_id, failed=failed, cached_tokens=cached_tokens, now=now)

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        with self._meter.on("read"):
            super().scraped(scraper, server, page, now=now)


def run(pool: Pool, *, servers: int, rate_per_s: float, seconds: float) -> tuple[Row, Meter, float]:
    """Make one run. Return its figures, the pickers' CPU, and the bytes that were sent to other pickers for
    each request.
    """
    spec, meter = MORE[MANY_SERVERS], Meter()
    assert spec.make is not None
    workload = OpenLoop(spec.make(random.Random(1), int(rate_per_s * seconds)), rate_per_s=rate_per_s)
    plan = plan_of(Setting(num_servers=servers), spec, arrivals_s=workload.last_arrival_s)
    plan = replace(plan, num_scrapers=pool.pickers, horizon_s=workload.last_arrival_s + GRACE_S)
    router = MeteredRouter(pool, meter)
    outcome = Fleet(plan, router=router, workload=workload, rng=random.Random(1)).run()
    bytes_sent = router.shared.sent_bytes / len(outcome.records) if router.shared is not None else 0.0
    return row_of(outcome), meter, bytes_sent


def line(label: str, row: Row, meter: Meter, bytes_sent: float, *, pickers: int) -> str:
    """Return a row of the table. The CPU is one picker's, divided by the requests of the whole pool."""
    per_request_us = {what: 1e6 * spent_s / row.requests for what, spent_s in meter.spent_s.items()}
    own = (per_request_us.get("pick", 0.0) + per_request_us.get("end", 0.0)) / pickers
    read, send, receive = (per_request_us.get(what, 0.0) / pickers for what in ("read", "send", "receive"))
    return (
        f"| {label} | {row.ttft_mean_s:.3f} / {row.ttft_p90_s:.3f} | {row.hit_ratio:.3f} | {row.load_cov:.2f} "
        f"| {row.completed:.3f} | {own:.0f} | {read:.0f} | {send:.0f} | {receive:.0f} | {bytes_sent:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing.scale", description=__doc__)
    add = parser.add_argument
    add("--servers", type=int, default=1000, metavar="N", help="number of servers (default %(default)s)")
    add("--rate", type=float, default=10_000.0, metavar="R", help="requests a second (default %(default)s)")
    add("--seconds", type=float, default=10.0, metavar="S", help="seconds of arrivals (default %(default)s)")
    add("--pickers", default="1,2,4,8,16", metavar="A,B", help="numbers of pickers (default %(default)s)")
    add("--rules", default="least-cost", metavar="A,B", help="rules of the picker (default %(default)s)")
    add("--apart", action="store_true", help="also run pickers that do not share")
    add(
        "--flush",
        type=float,
        default=0.05,
        metavar="S",
        help="seconds until pickers send their reports (default %(default)s)",
    )
    add("--by-prompt", action="store_true", help="send equal system prompts to the same picker")
    args = parser.parse_args()
    most = saturation(MANY_SERVERS, Setting())[0] * args.servers / 8
    print(f"{args.rate:.0f} requests/s are {args.rate / most:.2f} of saturation, by a fleet of 8\n")
    print(
        "| pickers | TTFT mean / p90 s | hits | load CoV | completed | CPU us at one picker for each request "
        "of the pool: own | pages | sending | receiving | bytes sent |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for rule in args.rules.split(","):
        for pickers in map(int, args.pickers.split(",")):
            for share in (True, False) if args.apart and pickers > 1 else (True,):
                pool = Pool(rule, pickers, share=share, flush_s=args.flush, by_prompt=args.by_prompt)
                row, meter, bytes_sent = run(
                    pool, servers=args.servers, rate_per_s=args.rate, seconds=args.seconds
                )
                label = f"{rule}, {pickers}{'' if share or pickers == 1 else ' apart'}"
                print(line(label, row, meter, bytes_sent, pickers=pickers), flush=True)


if __name__ == "__main__":
    main()
