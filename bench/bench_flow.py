"""Measures what flow control costs for a pick that does not have to wait, and for requests that wait.

`python -m bench.bench_flow`. The first table shows the CPU time of a pick in this process, with and without
flow control in turns, in several situations of the gate. It shows medians of all picks, so that other work of
the machine counts little. The servers are idle, so every request goes at once. The second table shows the CPU
time of the gate and its timer while many requests wait for busy servers: once while nothing happens, and once
while other requests end. `--profile` shows which functions take the extra time of the first table.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time
from math import inf
from statistics import median
from typing import Final

from msgspec.structs import replace

from bench.bench_pick import picker_of_pods, requests
from epp.base.errors import PickError
from epp.config.flow import Flow
from epp.config.policy import DEFAULT_POLICY, Policy
from epp.picker.decision import PickRequest
from epp.picker.endpoints.endpoint_state import Booking
from epp.picker.events import Pick
from epp.picker.gate import Claim, Gate
from epp.picker.model_queue import WaitingRequest
from epp.picker.picker import Picker
from epp.protocol.pump import Pump

SERVERS: Final = 8
PROMPT_BYTES: Final = 1_000
OBJECTIVES: Final = {"interactive": 10, "batch": -10}
SETTINGS: Final = {
    "one priority, one tenant": (Flow(mode="Hold"), [Claim()]),
    "with a deadline": (Flow(mode="Hold", deadline_seconds=2.0), [Claim()]),
    "two priorities, four tenants, a deadline": (
        Flow(mode="Hold", deadline_seconds=2.0, objectives=OBJECTIVES),
        [Claim(objective=o, tenant=t) for o in OBJECTIVES for t in ("a", "b", "c", "d")],
    ),
}
BUSY_SERVERS: Final = 100
ENDS_PER_S: Final = (0, 100)
WORK_S: Final = 3600.0
"""Seconds of work that each busy server has, so that none becomes free while requests wait."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_flow", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=60, help="number of rounds over the same requests (default 60)"
    )
    parser.add_argument("--picks", type=int, default=200, help="number of requests in a round (default 200)")
    parser.add_argument("--waiting", type=int, default=5000, help="number of waiting requests (default 5000)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds for which the requests wait (default 10)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print the functions that take the extra time of the first table",
    )
    args = parser.parse_args()
    print("| a pick that does not have to wait | without | with | more |\n| --- | --- | --- | --- |")
    for name, (flow, claims) in SETTINGS.items():
        without_us, with_us = pick_costs_us(flow, claims, rounds=args.rounds, picks=args.picks)
        print(f"| {name} | {without_us:.1f} us | {with_us:.1f} us | {with_us - without_us:.1f} us |")
    if args.profile:
        profile(args.picks * args.rounds)
    print(
        f"\n| {args.waiting:,} requests wait for {BUSY_SERVERS} busy servers | share of a core | checks a second |\n| --- | --- | --- |"
    )
    for ends_per_s in ENDS_PER_S:
        share, checks = asyncio.run(waiting_cost(args.waiting, args.seconds, ends_per_s=ends_per_s))
        print(f"| {ends_per_s} other requests end each second | {share:.4f} | {checks / args.seconds:.0f} |")


def pick_costs_us(flow: Flow, claims: list[Claim], *, rounds: int, picks: int) -> tuple[float, float]:
    """Return the microseconds of a pick without flow control and with it. Both are medians of single picks,
    which are made in turns.
    """
    sides: list[tuple[Picker, Gate | None]] = [(picker_of_pods(SERVERS), None), a_gate(flow)]
    work = requests(PROMPT_BYTES, count=picks, seed=1)
    spent_us: list[list[float]] = [[], []]
    for n in range(-2 * picks, rounds * picks):
        claim, now = claims[n % len(claims)], 3.0 + n / picks
        for side in (0, 1) if n % 2 else (1, 0):
            us = picked_us(*sides[side], work[n % picks], claim, now=now)
            if n >= 0:
                spent_us[side].append(us)
    return median(spent_us[0]), median(spent_us[1])


def a_gate(flow: Flow, *, servers: int = SERVERS) -> tuple[Picker, Gate]:
    picker = picker_of_pods(servers)
    picker.set_policy(holding(flow), now=0.0)
    return picker, Gate(picker)


def holding(flow: Flow) -> Policy:
    return replace(DEFAULT_POLICY, spec=replace(DEFAULT_POLICY.spec, flow=flow))


def picked_us(picker: Picker, gate: Gate | None, request: PickRequest, claim: Claim, *, now: float) -> float:
    """Return the microseconds of CPU for a pick. Work after the pick is not counted."""
    start_ns = time.process_time_ns()
    pick = pick_of(picker, gate, request, claim, now=now)
    spent_ns = time.process_time_ns() - start_ns
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
    picker.end(pick, outcome="ended", now=now)
    return spent_ns / 1000


def pick_of(picker: Picker, gate: Gate | None, request: PickRequest, claim: Claim, *, now: float) -> Pick:
    if gate is None or not gate.on:
        return picker.pick(request, now=now)
    pick = gate.offer(request, claim, _fail, size_bytes=PROMPT_BYTES, longest_s=inf, now=now)
    assert isinstance(pick, Pick), "the servers are idle"
    return pick


def profile(picks: int) -> None:
    flow, claims = SETTINGS["two priorities, four tenants, a deadline"]
    picker, gate = a_gate(flow)
    work = requests(PROMPT_BYTES, count=picks, seed=2)
    profiler = cProfile.Profile()
    profiler.enable()
    for n, request in enumerate(work):
        picked_us(picker, gate, request, claims[n % len(claims)], now=1.0 + n / 1000)
    profiler.disable()
    print()
    pstats.Stats(profiler).sort_stats("tottime").print_stats("flow|gate", 20)


async def waiting_cost(count: int, seconds: float, *, ends_per_s: int) -> tuple[float, int]:
    """Return the share of a core that this number of waiting requests takes, and how often the timer
    considered these requests. `ends_per_s` other requests end each second, and each of them may free a
    server. The loop that simulates these ends is counted too.
    """
    flow, claims = SETTINGS["two priorities, four tenants, a deadline"]
    picker, gate = a_gate(replace(flow, deadline_seconds=0.0, ttl_seconds=3600), servers=BUSY_SERVERS)
    start = time.monotonic()
    for state in picker.fleet.states():
        state.book(Booking(int(WORK_S * state.tokens_per_s), start), now=start)
    tickets = [
        gate.offer(request, claims[n % len(claims)], _fail, size_bytes=PROMPT_BYTES, longest_s=inf, now=start)
        for n, request in enumerate(requests(PROMPT_BYTES, count=count, seed=1))
    ]
    assert all(isinstance(ticket, WaitingRequest) for ticket in tickets), "the servers are busy"
    checks = 0

    def count_check(*, now: float) -> None:
        nonlocal checks
        checks += 1

    pump = Pump(gate, clock=time.monotonic, after=count_check)
    pump.soon()
    cpu_s, start_s = time.process_time(), time.monotonic()
    while (left_s := start_s + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, 1 / ends_per_s) if ends_per_s else left_s)
        pump.soon()
    cpu_s = time.process_time() - cpu_s
    pump.stop()
    return cpu_s / seconds, checks


def _fail(_fate: Pick | PickError, _now: float) -> None:
    raise AssertionError("nothing becomes free while the bench lasts")


if __name__ == "__main__":
    main()
