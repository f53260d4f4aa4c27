"""Measures the picker's CPU for the live page: `python -m bench.bench_page --busy`. Prints figures, and
asserts nothing.

A real picker has the given number of endpoints and its real admin address. Browsers in another process send
requests as the page does. Periods with and without the browsers alternate. The bench prints two figures, each
with its spread over the periods:

- by attribution: CPU time of everything that runs for the page. This is the connections (accepting, reading,
  writing), the handlers, making and compressing the page, and the page's history;
- by difference: CPU of the process with browsers, minus CPU without them. This includes work that cannot be
  attributed, such as the wake-ups of the loop, and the noise of the traffic.
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
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final

import aiohttp

from epp.config.policy import DEFAULT_POLICY
from epp.config.settings import Config
from epp.misses.explaining import Explaining
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.scraping.scraper import Scraper
from epp.serve.state_report import status_of
from epp.sources import Sources
from epp.telemetry.admin import AdminServer
from epp.telemetry.board import Board
from epp.telemetry.decisions import DecisionRing
from epp.telemetry.logs import LogCounts
from epp.telemetry.metrics import Metrics
from epp.telemetry.picker_state import PickerStatus
from epp.types import Address, Endpoint, EndpointMetrics, EndpointName
from tests.unit.picker_questions import ask, text

_SETTLE_S: Final = 3.0
"""Pause between the start or the end of the browsers and the measurement."""
_SERVERS_CODE: Final = ("/aiohttp/", "/asyncio/")
"""Tasks whose code is in these folders serve the page, because nothing else in this process uses aiohttp."""


async def main() -> None:
    args = _arguments()
    if args.client:
        await _browse(args.client, args.browsers)
        return
    async with _serving(args.endpoints, busy=args.busy) as served:
        periods = [
            (await _period(served, 0, args.seconds), await _period(served, args.browsers, args.seconds))
            for _ in range(args.rounds)
        ]
        size = len(await served.board.packed())
    alone = [without.all for without, _ in periods]
    attributed, making = [with_.page for _, with_ in periods], [with_.making for _, with_ in periods]
    differences = [with_.all - without.all for without, with_ in periods]
    print(
        f"{args.endpoints} endpoints, {'busy' if args.busy else 'idle'}; shares of a core, {args.rounds} rounds of {args.seconds:.0f} s:"
    )
    print(f"the picker without browsers            {_shares_text(alone)}")
    print(f"the page for {args.browsers} browsers, attributed   {_shares_text(attributed)}")
    print(f"  making and compressing the page      {_shares_text(making)}")
    print(f"the same by difference                 {_shares_text(differences)}")
    print(f"an answer has {size:,} bytes")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--endpoints", type=int, default=1000, help="number of endpoints (default %(default)s)"
    )
    parser.add_argument("--browsers", type=int, default=10, help="number of browsers (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds of a period (default %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="number of rounds; a round is one period with the browsers and one without (default %(default)s)",
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="scrape every endpoint each second, and send 50 requests a second",
    )
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _shares_text(shares: Sequence[float]) -> str:
    spread = f" +- {stdev(shares):.2%}" if len(shares) > 1 else ""
    return f"{fmean(shares):.2%}{spread} ({min(shares):.2%} to {max(shares):.2%})"


# -- measuring ----------------------------------------------------------------------------------------------


class _Spent:
    """Counts the CPU seconds that this thread spends on the page."""

    page_s = 0.0
    making_s = 0.0


_SPENT: Final = _Spent()


@dataclass(frozen=True, slots=True)
class _Shares:
    """The shares of a core in one period."""

    all: float
    page: float
    making: float


@dataclass(frozen=True, slots=True)
class _Served:
    url: str
    board: Board


async def _period(served: _Served, browsers: int, seconds: float) -> _Shares:
    if not browsers:
        await asyncio.sleep(_SETTLE_S)
        return await _share(seconds)
    command = [sys.executable, "-m", "bench.bench_page", "--client", served.url, "--browsers", str(browsers)]
    with subprocess.Popen(command) as clients:
        await asyncio.sleep(_SETTLE_S)
        shares = await _share(seconds)
        clients.terminate()
    return shares


async def _share(seconds: float) -> _Shares:
    began, cpu_s, page_s, making_s = time.monotonic(), time.process_time(), _SPENT.page_s, _SPENT.making_s
    await asyncio.sleep(seconds)
    spent_s = time.monotonic() - began
    return _Shares(
        all=(time.process_time() - cpu_s) / spent_s,
        page=(_SPENT.page_s - page_s) / spent_s,
        making=(_SPENT.making_s - making_s) / spent_s,
    )


class _Loop(asyncio.SelectorEventLoop):
    """Counts the CPU of all connections that it serves, and of the tasks that aiohttp starts for them.

    This is asyncio's own loop, which costs more than the picker's uvloop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_make_task)

    async def create_server(self, protocol_factory: Callable[[], Any], *args: Any, **options: Any) -> Any:
        return await super().create_server(lambda: _Connection(protocol_factory), *args, **options)


class _Counted:
    """A context manager that counts the CPU of its block as the page's."""

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        _SPENT.page_s += time.thread_time() - self._began_s


class _Connection(asyncio.Protocol):
    """Passes every call on to the protocol that it wraps."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        with _Counted():
            self._protocol = factory()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with _Counted():
            self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        with _Counted():
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        with _Counted():
            kept: bool | None = self._protocol.eof_received()
        return kept

    def connection_lost(self, exc: Exception | None) -> None:
        with _Counted():
            self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    **options: Any,
) -> asyncio.Task[Any]:
    code = getattr(coro, "cr_code", None)
    if code is not None and any(part in code.co_filename for part in _SERVERS_CODE):
        coro = _counted(coro)
    return asyncio.Task(coro, loop=loop, **options)


async def _counted(coro: Any) -> Any:
    """Return `coro`, with the CPU of each of its steps counted as the page's."""
    return await _Steps(coro)


class _Steps:
    def __init__(self, coro: Any) -> None:
        self._coro = coro

    def __await__(self) -> Generator[Any, Any, Any]:
        step, given = self._coro.send, None
        while True:
            try:
                with _Counted():
                    waits_for = step(given)
            except StopIteration as end:
                return end.value
            try:
                step, given = self._coro.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001 - into the coroutine, as a task does
                step, given = self._coro.throw, error


class _Timed(Board):
    """A Board that also counts the CPU of its pages. Without other pickers, nothing else runs while a page is
    made.
    """

    async def packed(self) -> bytes:
        began_s = time.thread_time()
        answer = await super().packed()
        _SPENT.making_s += time.thread_time() - began_s
        return answer

    def sample(self) -> None:
        began_s = time.thread_time()
        super().sample()
        _SPENT.making_s += time.thread_time() - began_s
        _SPENT.page_s += time.thread_time() - began_s


# -- the picker and its traffic ------------------------------------------------------------------------------


@asynccontextmanager
async def _serving(count: int, *, busy: bool) -> AsyncIterator[_Served]:
    """Run a picker that has seen some requests, with its admin address."""
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    endpoints = [
        Endpoint(EndpointName(f"vllm-{n}"), Address(f"10.0.{n // 200}.{n % 200 + 1}", 8000))
        for n in range(count)
    ]
    picker.set_endpoints(endpoints, now=time.monotonic())
    explaining, ring = Explaining(picker), DecisionRing(maxlen=1000)
    for n in range(500):
        prompt = text(f"system {n % 20}", 4000) + text(f"{n}", 4000)
        pick = picker.pick(ask(prompt), now=time.monotonic())
        picker.end(pick, outcome="ended", now=time.monotonic())
        ring.append(pick.decision)
    server, board = _admin(picker, ring, explaining)
    url = f"http://{await server.start()}/live"
    tasks = [asyncio.create_task(board.run()), asyncio.create_task(explaining.run())]
    if busy:
        tasks.append(asyncio.create_task(_traffic(picker, [e.name for e in endpoints], ring)))
    try:
        yield _Served(url, board)
    finally:
        for task in tasks:
            task.cancel()
        await server.stop()


def _admin(picker: Picker, ring: DecisionRing, explaining: Explaining) -> tuple[AdminServer, Board]:
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
            source_failures={}, probes={}, log_counts=LogCounts(), recorded={}, spans={}, now=time.monotonic(),
        )  # fmt: skip

    board = _Timed(
        state=state,
        decisions=ring,
        explain=explaining.account,
        prefixes=explaining.hot_prefixes,
        dry_run=lambda: None,
    )
    server = AdminServer(
        address=Address("127.0.0.1", 0),
        metrics=Metrics(decisions=ring, state=state),
        decisions=ring,
        state=state,
        not_ready=str,
        explain=explaining.account,
        board=board,
        recording=lambda *_: (b"", 0),
        config=Config(endpoints_file="e.yaml"),
        policy=lambda: DEFAULT_POLICY,
    )
    return server, board


async def _traffic(picker: Picker, names: Sequence[EndpointName], ring: DecisionRing) -> None:
    """Read a tenth of the endpoints' pages and send five requests, ten times a second. Each request ends two
    seconds later.
    """
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
            ring.append(pick.decision)
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


# -- the browsers --------------------------------------------------------------------------------------------


async def _browse(url: str, browsers: int) -> None:
    async def browser(session: aiohttp.ClientSession, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        while True:
            async with session.get(url) as answer:
                refresh_s = (await answer.json())["refresh_s"]
            await asyncio.sleep(refresh_s)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(browser(session, n / browsers) for n in range(browsers)))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(main())
