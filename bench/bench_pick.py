"""Measures what one request costs in the picker: `pick`, response headers, `end` and the eviction afterwards.

`python -m bench.bench_pick [--profile]`. All prompts share their first half, like a system prompt. The second
half is new, which is the expensive case: it is hashed and recorded, and evicts older prompts from the server
that holds the shared half. Times are CPU time of this process.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time

from msgspec.structs import replace

from epp.base.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import DEFAULT_POLICY
from epp.picker.decision import PickRequest
from epp.picker.picker import Picker

ROUNDS = 400
FLEETS = (4, 100, 1000, 5000)
SIZES = (1_000, 40_000, 400_000)


def picker_of_pods(fleet: int) -> Picker:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    names = [EndpointName(f"pod-{i}") for i in range(fleet)]
    picker.set_endpoints(
        [
            Endpoint(name, Address(f"10.0.{i // 250}.{i % 250 + 1}", 8000), model="m")
            for i, name in enumerate(names)
        ],
        now=0.0,
    )
    scrape(picker, now=0.0)
    return picker


def scrape(picker: Picker, *, now: float) -> None:
    """Read a page from every server."""
    page = EndpointMetrics(
        scraped_at=now,
        running=3,
        waiting=0,
        kv_usage=0.0,
        capacity_tokens=400_000,
        block_size=16,
        prompt_tokens=0.0,
    )
    for endpoint in picker.endpoints():
        picker.observe(endpoint.name, page, now=now)


def requests(size: int, *, count: int, seed: int) -> list[PickRequest]:
    rng = random.Random(seed)
    shared = random.Random(size).randbytes(size // 4).hex().encode()
    plain = InferenceRequest(kind=ApiKind.CHAT, model="m", stream=True)
    return [
        PickRequest(
            request_id=str(n),
            inference=replace(plain, prompt=shared + rng.randbytes(size // 4).hex().encode()),
        )
        for n in range(count)
    ]


def serve(picker: Picker, request: PickRequest, *, now: float) -> tuple[int, int]:
    """Serve one request from pick to end. Return the nanoseconds of CPU until the answer, and afterwards."""
    start = time.process_time_ns()
    pick = picker.pick(request, now=now)
    picked = time.process_time_ns()
    picker.tidy(now=now)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now + 0.001)
    picker.end(pick, outcome="ended", now=now + 0.002)
    return picked - start, time.process_time_ns() - picked


def quantile(values: list[int], share: float) -> float:
    """Return the quantile in microseconds."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] / 1000


def measure(fleet: int, size: int) -> None:
    picker = picker_of_pods(fleet)
    # A warm-up, after which the table knows the shared half.
    for n, request in enumerate(requests(size, count=ROUNDS // 4, seed=1)):
        serve(picker, request, now=n / 100)
    before, after = [], []
    for n, request in enumerate(requests(size, count=ROUNDS, seed=2)):
        now = 1 + n / 100
        if n % 100 == 0:
            scrape(picker, now=now)
        answered, rest = serve(picker, request, now=now)
        before.append(answered)
        after.append(rest)
    print(
        f"{fleet:>9} {size // 1000:>7} KB"
        + "".join(f" {quantile(values, share):>10.0f}" for values in (before, after) for share in (0.5, 0.99))
        + f" {picker.table.entries:>10}"
    )


def profile(fleet: int, size: int) -> None:
    picker, work = picker_of_pods(fleet), requests(size, count=ROUNDS, seed=3)
    profiler = cProfile.Profile()
    profiler.enable()
    for n, request in enumerate(work):
        serve(picker, request, now=n / 100)
    profiler.disable()
    print(f"\n{fleet} endpoints, {size // 1000} KB")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--profile", action="store_true", help="after the table, print the functions that take most time"
    )
    arguments = parser.parse_args()
    print(
        f"{'endpoints':>9} {'prompt':>10} {'pick p50':>10} {'p99':>10} {'rest p50':>10} {'p99 us':>10} {'entries':>10}"
    )
    for fleet in FLEETS:
        for size in SIZES:
            measure(fleet, size)
    if arguments.profile:
        profile(100, 1_000)
        profile(4, 400_000)


if __name__ == "__main__":
    main()
