"""CPU that the live page costs the picker: `python -m bench.bench_page`. Prints, and asserts nothing.

A real picker with so many endpoints and its real admin address; ten clients in another process ask as browsers do. The process is measured
with the clients and without them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

import aiohttp

from epp.config.policy import DEFAULT_POLICY
from epp.config.settings import Config
from epp.decision import Pick
from epp.misses.explaining import Explaining
from epp.picker import Picker
from epp.scraping.scraper import Scraper
from epp.sources import Sources
from epp.state_report import status_of
from epp.telemetry.admin import AdminServer
from epp.telemetry.board import Board
from epp.telemetry.decisions import DecisionRing
from epp.telemetry.metrics import Metrics
from epp.telemetry.queued import LogCounts
from epp.telemetry.state import PickerStatus
from epp.types import Address, Endpoint, EndpointMetrics, EndpointName
from tests.unit.picker_questions import ask, text


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoints", type=int, default=1000)
    parser.add_argument("--browsers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--busy",
        action="store_true",
        help="every endpoint is scraped each second, and 50 requests a second come",
    )
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        await _look(args.client, args.browsers)
        return
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    endpoints = [
        Endpoint(EndpointName(f"vllm-{n}"), Address(f"10.0.{n // 200}.{n % 200 + 1}", 8000))
        for n in range(args.endpoints)
    ]
    picker.set_endpoints(endpoints, now=time.monotonic())
    explaining, ring = Explaining(picker), DecisionRing(keep=1000)
    for n in range(500):
        prompt = text(f"system {n % 20}", 4000) + text(f"{n}", 4000)
        pick = picker.pick(ask(prompt), now=time.monotonic())
        picker.end(pick, outcome="ended", now=time.monotonic())
        ring.add(pick.decision)
    scraper = Scraper(
        settings=lambda: picker.policy.spec.scrape,
        on_metrics=lambda *_: None,
        in_use=lambda *_: True,
        clock=time.monotonic,
        keep=Sources(rng=random.Random(1)).keep,
        rng=random.Random(1),
    )

    def state() -> PickerStatus:
        return status_of(
            picker, scraper, None, None, draining=False, held_body_bytes=0, overload_ratio=0.0, flow=(),
            source_failures={}, log_counts=LogCounts(), recorded={}, spans={}, now=time.monotonic(),
        )  # fmt: skip

    board = _Timed(
        state=state,
        decisions=ring,
        explain=explaining.told,
        prefixes=explaining.hot_prefixes,
        dry_run=lambda: None,
    )
    server = AdminServer(
        address=Address("127.0.0.1", 0),
        metrics=Metrics(decisions=ring, state=state),
        decisions=ring,
        state=state,
        not_ready=str,
        explain=explaining.told,
        board=board,
        recording=lambda *_: (b"", 0),
        config=Config(endpoints_file="e.yaml"),
        policy=lambda: DEFAULT_POLICY,
    )
    url = f"http://{await server.start()}/live"
    tasks = [asyncio.create_task(board.run()), asyncio.create_task(explaining.run())]
    if args.busy:
        tasks.append(asyncio.create_task(_traffic(picker, [e.name for e in endpoints], ring)))
    idle = await _share(args.seconds)
    command = [sys.executable, "-m", "bench.bench_page", "--client", url, "--browsers", str(args.browsers)]
    with subprocess.Popen(command) as clients:
        await asyncio.sleep(5.0)
        made_s = board.cpu_s
        looked_at = await _share(args.seconds)
        made = (board.cpu_s - made_s) / args.seconds
        clients.terminate()
    size = len(await board.packed())
    for task in tasks:
        task.cancel()
    await server.stop()
    print(
        f"{args.endpoints} endpoints: {idle:.2%} of a core with nobody looking (history and account), {looked_at:.2%} with {args.browsers} "
        f"browsers, {made:.2%} of it for making the page and its history; an answer has {size:,} bytes"
    )


class _Timed(Board):
    """Knows the CPU that its pages took."""

    cpu_s = 0.0

    async def packed(self) -> bytes:
        began = time.process_time()
        answer = await super().packed()  # without siblings nothing else runs meanwhile
        self.cpu_s += time.process_time() - began
        return answer

    def sample(self) -> None:
        began = time.process_time()
        super().sample()
        self.cpu_s += time.process_time() - began


async def _traffic(picker: Picker, names: Sequence[EndpointName], ring: DecisionRing) -> None:
    """A tenth of the endpoints' pages and five requests, ten times a second; each request ends two seconds later."""
    rng, under_way = random.Random(2), deque[tuple[float, Pick]]()
    tokens = dict.fromkeys(names, 0.0)
    for turn in itertools.count():
        now = time.monotonic()
        for name in names[turn % 10 :: 10]:
            tokens[name] += rng.randrange(8000)
            picker.observe(name, _page(rng, tokens[name], now), now=now)
        while under_way and under_way[0][0] <= now:
            picker.end(under_way.popleft()[1], outcome="ended", now=now)
        for _ in range(5):
            prompt = text(f"system {rng.randrange(20)}", 4000) + text(f"{turn} {rng.random()}", 4000)
            pick = picker.pick(ask(prompt), now=now)
            ring.add(pick.decision)
            under_way.append((now + 2, pick))
        await asyncio.sleep(0.1)


def _page(rng: random.Random, tokens: float, now: float) -> EndpointMetrics:
    return EndpointMetrics(
        scraped_at=now,
        running=rng.randrange(60),
        waiting=rng.randrange(5),
        kv_usage=rng.random(),
        capacity_tokens=500_000,
        prompt_tokens=tokens,
        cached_prompt_tokens=tokens * 0.6,
        prefix_queries=tokens,
        prefix_hits=tokens * 0.6,
    )


async def _share(seconds: float) -> float:
    began, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu_s) / (time.monotonic() - began)


async def _look(url: str, browsers: int) -> None:
    async def one(session: aiohttp.ClientSession, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        while True:
            async with session.get(url) as answer:
                refresh_s = (await answer.json())["refresh_s"]
            await asyncio.sleep(refresh_s)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session, n / browsers) for n in range(browsers)))


if __name__ == "__main__":
    asyncio.run(main())
