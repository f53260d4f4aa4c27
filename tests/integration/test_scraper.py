"""The scraper reads real servers over real HTTP. Some servers behave well, and others do not."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TypeAlias

import msgspec
import pytest

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import Scrape
from epp.sources.keep import Sources
from epp.sources.scraping.scraper import Scraper
from tests.harness.listening import accepting
from tests.harness.processes import wait_until
from tests.harness.tasks import running_task

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Handler = Callable[[str, Reader, Writer], Awaitable[None]]
"""Answers one request, given its head. The connection closes when the handler returns."""

PAGE = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
IDLE_PAGE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
FAST = Scrape(interval_seconds=0.05, timeout_seconds=60.0)
IMPATIENT = msgspec.structs.replace(FAST, timeout_seconds=0.5)
AT_ONCE = Scrape(interval_seconds=0.0, stale_after_seconds=0.0)


def http(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


class BareServer:
    """Speaks just enough HTTP to misbehave in exact ways. Counts connections and requests."""

    def __init__(self, answer: bytes | Handler) -> None:
        self._answer = answer
        self.connections = 0
        self.heads: list[str] = []
        self.address = Address("127.0.0.1", 1)

    @asynccontextmanager
    async def running(self, *, port: int = 0) -> AsyncIterator[BareServer]:
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: Reader, writer: Writer) -> None:
            self.connections += 1
            task = asyncio.create_task(self._serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        try:
            async with accepting(connected, port=port) as taken:
                self.address = Address("127.0.0.1", taken)
                yield self
        finally:
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                if isinstance(self._answer, bytes):
                    writer.write(self._answer)
                    await writer.drain()
                else:
                    await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class WatchedScraper:
    """A scraper and what it reported. fails_at: an endpoint whose reports make the consumer fail."""

    def __init__(self, settings: Scrape = FAST, *, fails_at: str = "") -> None:
        self.settings = settings
        self._fails_at = fails_at
        self.in_use: set[str] = set()
        self.seen: dict[str, list[EndpointMetrics | None]] = defaultdict(list)
        self.sources = Sources(rng=Random(7), first_pause_s=0.01)
        self.scraper = Scraper(
            settings=lambda: self.settings,
            on_metrics=self._on_metrics,
            in_use=lambda name: name in self.in_use,
            clock=time.monotonic,
            keep=self.sources.keep,
            rng=Random(7),
        )

    def _on_metrics(self, name: EndpointName, metrics: EndpointMetrics | None) -> None:
        self.seen[name].append(metrics)
        if name == self._fails_at:
            raise RuntimeError("consumer bug")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[WatchedScraper]:
        async with running_task(self.scraper.run):
            yield self

    async def until(self, condition: Callable[[], bool]) -> None:
        await wait_until(condition, what="the scraper is so far")

    def error(self, name: str) -> str:
        return self.scraper.targets[EndpointName(name)].error


def scraped_endpoint(name: str, address: Address, *, incarnation: str = "") -> Endpoint:
    return Endpoint(name=EndpointName(name), address=address, incarnation=incarnation)


async def test_pages_are_read_again_and_again_over_one_connection() -> None:
    async with BareServer(http(PAGE)).running() as server, WatchedScraper().running() as watched:
        watched.scraper.set_endpoints([scraped_endpoint("a", server.address)])
        await watched.until(lambda: len(watched.seen["a"]) >= 4)
        metrics = watched.seen["a"][-1]
        assert metrics is not None
        assert (metrics.running, metrics.waiting) == (2, 1)
        assert server.connections == 1
        assert server.heads[0].startswith("GET /metrics HTTP/1.1\r\n")
        target = watched.scraper.targets[EndpointName("a")]
        assert (target.answered_at, target.error) == (metrics.scraped_at, "")


async def hang_after_head(head: str, reader: Reader, writer: Writer) -> None:
    await reader.read()


async def drip(head: str, reader: Reader, writer: Writer) -> None:
    """Send a page that never ends, a few bytes at a time."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"4\r\nvllm\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def flood(head: str, reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"vllm:num_requests_running 1\n" * 1000)
        await writer.drain()


async def continue_for_ever(head: str, reader: Reader, writer: Writer) -> None:
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        await writer.drain()


async def hang_up(head: str, reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\nvllm:num")
    await writer.drain()
    raise ConnectionResetError


async def reset(head: str, reader: Reader, writer: Writer) -> None:
    """Send a page without a size, and reset the connection, so that the page may lack its end."""
    writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + PAGE)
    await writer.drain()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def end_at_once(head: str, reader: Reader, writer: Writer) -> None:
    raise ConnectionResetError


MISBEHAVING: dict[str, tuple[bytes | Handler, str]] = {
    "hangs": (hang_after_head, "no answer within"),
    "drips": (drip, "no answer within"),
    "floods": (flood, "page has more than 4194304 bytes"),
    "huge": (http(b"vllm:x 1\n" * 500_000), "page has more than 4194304 bytes"),
    "hangs up": (hang_up, "ended the connection before the end of its answer"),
    "garbage page": (http(b"\xff\x00<html>" * 100), "no metric of a known"),
    "not http": (
        b"\x15\x03\x01 this is TLS\r\n\r\n",
        "if it expects TLS: model servers are reached by plain HTTP",
    ),
    "ends at once": (end_at_once, "if it expects TLS: model servers are reached by plain HTTP"),
    "resets": (reset, "the server ended the connection"),
    "never begins": (continue_for_ever, "the head of the answer has more than 16384 bytes"),
    "redirects": (http(b"", status="302 Found", headers="location: /elsewhere\r\n"), "HTTP status 302"),
    "fails": (http(PAGE, status="500 Internal Server Error"), "HTTP status 500"),
    "unreadable": (http(b"vllm:num_requests_running NaN\n"), "not a number"),
    "packed": (http(PAGE, headers="content-encoding: gzip\r\n"), ""),
    "trtllm": (http(b"[]"), "no metric of a known"),
    "no page": (http(b"", status="404 Not Found"), "HTTP status 404"),
}
UP = {"floods", "huge", "garbage page", "redirects", "unreadable", "trtllm", "no page"}
"""Servers that answer, and give no numbers."""
HANGING = {"hangs", "drips"}


@pytest.mark.parametrize(
    "names", [MISBEHAVING.keys() - HANGING, {"hangs"}, {"drips"}], ids=["answer", "hangs", "drips"]
)
async def test_misbehaving_servers_have_a_reason_and_hurt_no_other(names: set[str]) -> None:
    settings = IMPATIENT if names <= HANGING else FAST
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        servers = {name: await enter(BareServer(MISBEHAVING[name][0]).running()) for name in names}
        good = await enter(BareServer(http(PAGE)).running())
        watched = await enter(WatchedScraper(settings).running())
        addresses = {name: server.address for name, server in servers.items()}
        addresses |= {"good": good.address, "dead": Address("127.0.0.1", 1)}
        watched.scraper.set_endpoints([scraped_endpoint(*each) for each in addresses.items()])
        await watched.until(lambda: all(len(watched.seen[n]) >= 2 for n in (*names, "dead")))
        await watched.until(lambda: len(list(filter(None, watched.seen["good"]))) >= 5)
        for name in names:
            reason = MISBEHAVING[name][1]
            assert reason in watched.error(name), name
            failed = bool(reason) and name not in UP
            assert all((metrics is None) == failed for metrics in watched.seen[name]), name
            assert all(metrics.inside is None for metrics in watched.seen[name] if metrics and reason), name
        assert watched.error("dead") == "cannot connect to port 1: Connection refused"
        assert settings is IMPATIENT or None not in watched.seen["good"]
        assert all(head.startswith("GET /metrics ") for server in servers.values() for head in server.heads)


async def test_server_that_comes_back_is_read_again_and_both_changes_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="epp.sources.scraping.scraper")
    async with WatchedScraper().running() as watched:
        async with BareServer(http(PAGE)).running() as server:
            watched.scraper.set_endpoints([scraped_endpoint("a", server.address)])
            await watched.until(lambda: bool(watched.seen["a"]))
        async with BareServer(http(b"[]")).running(port=server.address.port):  # numbers that go are a fault
            await watched.until(lambda: watched.seen["a"][-2:] == [None, None])
        async with BareServer(http(PAGE)).running(port=server.address.port):
            await watched.until(lambda: watched.seen["a"][-1] is not None)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    assert "fails" in lines[0]
    assert "works again" in lines[1]


async def test_an_endpoint_taken_off_the_list_is_not_read_any_more() -> None:
    async with (
        BareServer(http(PAGE)).running() as gone,
        BareServer(http(PAGE)).running() as kept,
        WatchedScraper().running() as watched,
    ):
        watched.scraper.set_endpoints(
            [scraped_endpoint("gone", gone.address), scraped_endpoint("kept", kept.address)]
        )
        await watched.until(lambda: len(watched.seen["gone"]) >= 1)
        watched.scraper.set_endpoints([scraped_endpoint("kept", kept.address)])
        count, reports = len(gone.heads), len(watched.seen["gone"])
        goal = len(watched.seen["kept"]) + 5
        await watched.until(lambda: len(watched.seen["kept"]) >= goal)
        assert (len(gone.heads), len(watched.seen["gone"])) == (count, reports)
        assert list(watched.scraper.targets) == ["kept"]


async def test_a_new_address_under_an_old_name_is_read_and_has_no_age() -> None:
    async with (
        BareServer(http(PAGE)).running() as first,
        BareServer(http(PAGE)).running() as second,
        WatchedScraper().running() as watched,
    ):
        watched.scraper.set_endpoints([scraped_endpoint("a", first.address)])
        await watched.until(lambda: bool(watched.seen["a"]))
        watched.scraper.set_endpoints([scraped_endpoint("a", second.address)])
        assert watched.scraper.targets[EndpointName("a")].answered_at is None
        await watched.until(lambda: bool(second.heads))


async def test_a_changed_policy_applies_to_scrapes_already_waiting() -> None:
    watched = WatchedScraper(Scrape(interval_seconds=60))
    async with BareServer(http(PAGE)).running() as server, watched.running():
        watched.scraper.set_endpoints([scraped_endpoint(str(n), server.address) for n in range(3)])
        for _ in range(5):
            await asyncio.sleep(0)  # the tasks start and then wait
        watched.settings = Scrape(interval_seconds=0.05, path="/other")
        await watched.until(lambda: all(len(watched.seen[str(n)]) >= 2 for n in range(3)))
        assert all(head.startswith("GET /other ") for head in server.heads)


async def test_an_idle_server_is_read_less_often_until_a_request_is_sent_to_it() -> None:
    settings = msgspec.structs.replace(FAST, idle_interval_seconds=6000.0)
    async with (
        BareServer(http(PAGE)).running() as busy,
        BareServer(http(IDLE_PAGE)).running() as free,
        WatchedScraper(settings).running() as watched,
    ):
        watched.scraper.set_endpoints(
            [scraped_endpoint("busy", busy.address), scraped_endpoint("free", free.address)]
        )
        await watched.until(lambda: len(watched.seen["busy"]) >= 20)
        assert len(watched.seen["free"]) == 1
        watched.in_use.add("free")
        await watched.until(lambda: len(watched.seen["free"]) >= 3)


async def test_a_large_fleet_is_read_less_often() -> None:
    small, large = WatchedScraper(), WatchedScraper()
    async with BareServer(http(PAGE)).running() as server, small.running(), large.running():
        large.scraper.set_endpoints([scraped_endpoint(str(n), server.address) for n in range(200)])
        small.scraper.set_endpoints([scraped_endpoint("a", server.address)])
        await small.until(lambda: len(small.seen["a"]) >= 30)
        assert sum(map(len, large.seen.values())) <= 10 * len(large.seen)
        await large.until(lambda: len(large.seen) == 200)


async def test_servers_that_become_idle_together_are_spread_over_idle_interval() -> None:
    """Jitter alone would leave them in one burst: the first of them would be read after 54 s."""
    settings = msgspec.structs.replace(FAST, timeout_seconds=5.0, idle_interval_seconds=60.0)
    async with BareServer(http(IDLE_PAGE)).running() as server, WatchedScraper(settings).running() as watched:
        watched.scraper.set_endpoints([scraped_endpoint(str(n), server.address) for n in range(100)])
        await watched.until(lambda: any(len(seen) >= 2 for seen in watched.seen.values()))


async def test_a_server_may_have_its_page_at_another_port_and_path() -> None:
    async with BareServer(http(PAGE)).running() as server, WatchedScraper().running() as watched:
        serving = Address("127.0.0.1", 1)
        places = {"port": f":{server.address.port}", "both": f":{server.address.port}/prometheus/metrics"}
        watched.scraper.set_endpoints(
            [replace(scraped_endpoint(name, serving), metrics=place) for name, place in places.items()]
            + [replace(scraped_endpoint("path", server.address), metrics="/stats")]
        )
        await watched.until(lambda: all(watched.seen[name] for name in ("port", "both", "path")))
        assert all(watched.error(name) == "" for name in ("port", "both", "path"))
        paths = {head.split()[1] for head in server.heads}
        assert paths == {"/metrics", "/prometheus/metrics", "/stats"}


async def test_a_connection_closed_between_two_pages_is_no_failed_scrape() -> None:
    async def answer_and_leave(head: str, reader: Reader, writer: Writer) -> None:
        """Answer and close the connection without saying so, as a server does that ends idle connections."""
        writer.write(http(PAGE))
        await writer.drain()
        raise ConnectionResetError

    async with BareServer(answer_and_leave).running() as server, WatchedScraper().running() as watched:
        watched.scraper.set_endpoints([scraped_endpoint("a", server.address)])
        await watched.until(lambda: len(watched.seen["a"]) >= 3)
        assert None not in watched.seen["a"]
        assert server.connections >= 3


async def test_a_consumer_that_fails_at_one_page_does_not_stop_the_other_scrapes() -> None:
    watched = WatchedScraper(fails_at="a")
    async with BareServer(http(PAGE)).running() as server, watched.running():
        watched.scraper.set_endpoints([scraped_endpoint(name, server.address) for name in ("a", "b")])
        await watched.until(lambda: len(watched.seen["a"]) > 2 and len(watched.seen["b"]) > 5)
    assert watched.sources.failures["scrape"] >= 2


async def test_a_few_servers_come_go_or_are_asked_in_a_turn_later_in_a_second() -> None:
    seen: list[tuple[int, int]] = []
    async with BareServer(b"").running() as server, WatchedScraper(AT_ONCE).running() as watched:
        watched.scraper.set_endpoints([scraped_endpoint(str(n), server.address) for n in range(100)])
        while (tasks := sum("scrape of" in t.get_name() for t in asyncio.all_tasks())) or len(seen) < 2:
            seen.append((server.connections, tasks))
            if server.connections >= 100:
                watched.scraper.set_endpoints([])
            await asyncio.sleep(0)
    for most, counts in zip((20, 8), zip(*seen, strict=True), strict=True):
        assert max(abs(after - before) for before, after in pairwise(counts)) <= most
    assert sum(connections < 100 for connections, _ in seen) < 100, "a busy picker has long turns"
    watched.scraper.clock = lambda: time.monotonic() + 10.0  # the start is over
    async with BareServer(b"").running() as server, watched.running():
        watched.scraper.set_endpoints([scraped_endpoint(str(n), server.address) for n in range(100)])
        began = time.monotonic()
        await wait_until(lambda: server.connections >= 100, what="all were asked")
        assert time.monotonic() - began > 0.8, "a hundred in a second, however fast the machine is"


async def test_many_dead_servers_keep_no_other_server_waiting() -> None:
    watched = WatchedScraper(msgspec.structs.replace(FAST, stale_after_seconds=0.2))
    dead = [scraped_endpoint(f"dead {n}", Address("127.0.0.1", 1)) for n in range(200)]
    async with BareServer(http(b"", status="404 Not Found")).running() as server, watched.running():
        failing, new = (scraped_endpoint(name, server.address) for name in ("failing", "new"))
        watched.scraper.clock = lambda: time.monotonic() - 10.0
        watched.scraper.set_endpoints([failing])
        watched.scraper.clock = time.monotonic  # the start is over
        watched.scraper.set_endpoints([failing, *dead])
        await watched.until(lambda: len(watched.seen) == 201)
        watched.scraper.set_endpoints([failing, *dead, new])
        reports, goal = sum(map(len, watched.seen.values())), len(watched.seen["failing"]) + 2
        await watched.until(lambda: bool(watched.seen["new"]) and len(watched.seen["failing"]) >= goal)
        assert sum(map(len, watched.seen.values())) < reports + 100
