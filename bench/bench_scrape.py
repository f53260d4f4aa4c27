"""Measures what scraping costs: CPU of a scraper with 100 servers that return a page of vLLM's size, while
they work and while they are idle.

Run with `python -m bench.bench_scrape [servers] [seconds]`. The servers run in another process, so the CPU
shown is the scraper's alone: fetching, reading and the loop's timers. Prints a table, and asserts nothing,
since machines differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from random import Random
from typing import cast

import uvloop

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.routing import Scrape
from epp.sources.keep import Sources
from epp.sources.scraping.metrics_page import parse_page
from epp.sources.scraping.scraper import Scraper
from tests.unit.sources.scraping.metric_pages import EngineState, LoraSeries, vllm_page

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
_PROCESS = b"""\
# HELP process_cpu_seconds_total Total user and system CPU time spent in seconds.
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total %.2f
"""
_TOKENS = b"""\
# TYPE vllm:more_tokens_total counter
vllm:more_tokens_total %d
"""


class _Answers(asyncio.Protocol):
    """Sends its page as the answer to any bytes, which is as cheap as a server can be. Its CPU seconds grow
    from page to page. While the server works, its tokens grow too.
    """

    def __init__(self, page: bytes, *, works: bool) -> None:
        self._page = page
        self._works = works
        self._answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            "asyncio.Transport", transport
        )  # uvloop's own class, which is not a subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        self._answers += 1
        process = _PROCESS % (self._answers / 100)
        tokens = _TOKENS % (self._answers * self._works)
        size = len(process) + len(self._page) + len(tokens)
        self._transport.write(_HEAD % size + process + self._page + tokens)


def _serve(servers: int, page: bytes, ports: Connection, *, works: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = [
            await loop.create_server(lambda: _Answers(page, works=works), "127.0.0.1", 0)
            for _ in range(servers)
        ]
        ports.send([server.sockets[0].getsockname()[1] for server in listening])
        await loop.create_future()

    uvloop.run(main())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _scrape(ports: list[int], seconds: float) -> tuple[float, int, int]:
    """Return (cores used, pages read, scrapes failed) over `seconds`, after a warm-up."""
    good = failed = 0

    def count(_: EndpointName, metrics: EndpointMetrics | None) -> None:
        nonlocal good, failed
        good += metrics is not None
        failed += metrics is None

    keep = Sources(rng=Random(1)).keep
    scraper = Scraper(
        settings=Scrape,
        on_metrics=count,
        in_use=lambda _: False,
        clock=time.monotonic,
        keep=keep,
        rng=Random(1),
    )
    scraper.set_endpoints([Endpoint(EndpointName(f"s{port}"), Address("127.0.0.1", port)) for port in ports])
    running = asyncio.create_task(scraper.run())
    await asyncio.sleep(2.5)
    good = failed = 0
    before_s, started = _cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    cores = (_cpu_s() - before_s) / (time.monotonic() - started)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return cores, good, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", type=int, nargs="?", default=100, help="number of model servers (100)")
    parser.add_argument("seconds", type=float, nargs="?", default=8.0, help="length of each row (8)")
    options = parser.parse_args()
    servers, seconds = options.servers, options.seconds
    busy = EngineState(
        running=3, waiting=1, kv_usage=0.4, finished={"stop": 9, "length": 1}, ttft_s=(0.4,), prefill_s=(0.2,)
    )
    pages = {
        state: vllm_page([engine], loras=[LoraSeries(at=1.0, running="sql")])
        for state, engine in (("busy", busy), ("idle", replace(busy, running=0, waiting=0)))
    }
    page = pages["busy"]
    started = time.perf_counter()
    for _ in range(500):
        parse_page(page, scraped_at=0.0)
    parse_us = (time.perf_counter() - started) / 500 * 1e6
    lines = len(page.splitlines())
    print(f"page {len(page) / 1000:.1f} kB, {lines} lines, reading it {parse_us:.0f} us")
    print(f"{'loop':10} {'page':>5} {'servers':>8} {'pages/s':>8} {'failed':>7} {'cores':>7} {'us/page':>8}")
    for name, run in (("uvloop", uvloop.run), ("asyncio", asyncio.run)):
        for state, shown in pages.items():
            with _serving(servers, shown, works=state == "busy") as ports:
                cores, good, failed = run(_scrape(ports, seconds))
            each_us = cores * seconds / max(1, good) * 1e6
            print(
                f"{name:10} {state:>5} {servers:>8} {good / seconds:>8.1f} {failed:>7} {cores:>7.3f} {each_us:>8.0f}"
            )


@contextlib.contextmanager
def _serving(servers: int, page: bytes, *, works: bool) -> Iterator[list[int]]:
    """Run the servers in another process, and yield their ports."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(
        target=_serve, args=(servers, page, there), kwargs={"works": works}, daemon=True
    )
    server.start()
    try:
        yield here.recv()
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
