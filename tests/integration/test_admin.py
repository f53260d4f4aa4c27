"""The admin address over real HTTP, also while clients never finish their requests."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from epp.base.errors import NoEndpointError
from epp.base.types import Address, EndpointName
from epp.observe.telemetry.admin import BoundedConnections
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus
from epp.picker.events import Refused
from epp.transport.accepting import Acceptor
from tests.harness.arriving import TURNS, connect_and_stop
from tests.harness.live_page import an_admin
from tests.harness.raw_http import connection, send_raw
from tests.unit.observe.telemetry.records import HERE, THERE, began, decision, pick

HOSTILE = "<script>alert(1)</script>\"'&"


@dataclass
class Admin:
    """A running admin server, what it shows, and a client."""

    status: PickerStatus = field(default_factory=PickerStatus)
    not_ready: str = ""
    hosts: tuple[str, ...] = ()
    ring: DecisionRing = field(default_factory=lambda: DecisionRing(maxlen=100))
    address: Address = field(init=False)
    session: aiohttp.ClientSession = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(decisions=self.ring, state=lambda: self.status)
        self.server = an_admin(
            self.ring,
            lambda: self.status,
            metrics=self.metrics,
            not_ready=lambda: self.not_ready,
            hosts=self.hosts,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Admin]:
        self.address = await self.server.start()
        async with aiohttp.ClientSession() as self.session:
            yield self
        await self.server.stop()

    async def text(self, path: str, *, status: int = 200, method: str = "GET") -> str:
        async with self.session.request(
            method, URL(f"http://{self.address}{path}", encoded=True)
        ) as response:
            self.headers = response.headers
            assert response.status == status, await response.text()
            text: str = await response.text()
            return text

    async def json(self, path: str, *, status: int = 200, method: str = "GET") -> Any:
        text = await self.text(path, status=status, method=method)
        assert self.headers["Content-Type"].startswith("application/json")
        return json.loads(text)


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    async with Admin().running() as running:
        yield running


async def test_an_address_of_all_families_answers_over_ipv4_too() -> None:
    server = an_admin(address=Address("::", 0))
    address = await server.start()
    async with aiohttp.ClientSession() as session:
        for host in ("127.0.0.1", "[::1]"):
            async with session.get(f"http://{host}:{address.port}/healthz") as response:
                assert response.status == 200
    await server.stop()


async def test_metrics_are_in_prometheus_text_format(admin: Admin) -> None:
    admin.metrics.on_event(began(pick()))
    page = await admin.text("/metrics")
    assert "\nepp_in_flight 1.0\n" in page
    assert "\nprocess_cpu_seconds_total " in page
    assert admin.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_the_metrics_of_many_servers_leave_the_loop_to_others_in_between(admin: Admin) -> None:
    """A page of 1,000 servers takes 0.14 s to make, and clients decide how often the page is made."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.timeout(30):
        counting = asyncio.create_task(count())
        await admin.text("/metrics")
        counting.cancel()
    assert turns > len(list(admin.metrics.pieces())) > 30


async def test_readyz_says_why_the_picker_is_not_ready_and_healthz_stays_ok(admin: Admin) -> None:
    assert await admin.json("/readyz") == {"status": "ready"}
    admin.not_ready = "draining"
    assert await admin.json("/readyz", status=503) == {"status": "not ready", "reason": "draining"}
    assert await admin.json("/healthz") == {"status": "ok"}


async def test_decisions_are_listed_newest_first_filtered_and_limited(admin: Admin) -> None:
    admin.metrics.on_event(Refused("refused", NoEndpointError("none is ready", reason="no_endpoints")))
    for n in range(60):
        admin.ring.append(decision(f"r{n}", chosen="ab"[n % 2]))

    async def ids(query: str) -> list[str]:
        return [d["request_id"] for d in (await admin.json(f"/decisions{query}"))["decisions"]]

    assert await ids("") == [f"r{n}" for n in range(59, 9, -1)]
    assert await ids("?limit=2") == ["r59", "r58"]
    assert await ids("?endpoint=a&limit=2") == ["r58", "r56"]
    assert await ids("?endpoint=none") == []
    assert (await ids("?limit=99999"))[59:] == ["r0", "refused"]


async def test_one_answer_lists_a_thousand_decisions_at_most() -> None:
    ring = DecisionRing(maxlen=3_000)
    for n in range(3_000):
        ring.append(decision(f"r{n}"))
    async with Admin(ring=ring).running() as admin:
        assert len((await admin.json("/decisions?limit=999999999"))["decisions"]) == 1_000


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1e3", "9999999999"])
async def test_a_senseless_limit_is_refused(admin: Admin, limit: str) -> None:
    answer = await admin.json(f"/decisions?limit={limit}", status=400)
    assert "limit" in answer["error"]


@pytest.mark.parametrize("request_id", ["r1", "a/b", "with space", "ü", "a%2Fb", "?x=1", HOSTILE])
async def test_a_decision_is_found_by_any_request_id(admin: Admin, request_id: str) -> None:
    admin.ring.append(decision(request_id))
    shown = await admin.json(f"/decisions/{quote(request_id, safe='')}")
    assert shown["request_id"] == request_id
    assert shown["candidates"][1]["address"] == str(THERE)


async def test_unknown_pages_and_methods_get_errors_in_json(admin: Admin) -> None:
    assert "no decision" in (await admin.json("/decisions/unknown", status=404))["error"]
    assert await admin.json("/nothing", status=404) == {"error": "Not Found"}
    assert "Allowed" in (await admin.json("/policy", status=405, method="POST"))["error"]
    assert "GET" in admin.headers["Allow"]


async def test_the_page_of_endpoints_shows_the_facts_about_each(admin: Admin) -> None:
    a = EndpointStatus(
        name=EndpointName("a"), address=THERE.text, in_flight=4, adapters=("sql",), waiting=None
    )
    admin.status = PickerStatus(endpoints=(a,), policy="p", rule="least-cost", table_entries=9)
    shown = await admin.json("/endpoints")
    assert (shown["policy"], shown["rule"], shown["table_entries"]) == ("p", "least-cost", 9)
    (endpoint,) = shown["endpoints"]
    assert (endpoint["name"], endpoint["address"], endpoint["in_flight"]) == ("a", "[fd00::2]:8000", 4)
    assert (endpoint["adapters"], endpoint["waiting"]) == (["sql"], None)


async def test_the_policy_in_use_is_shown(admin: Admin) -> None:
    assert (await admin.json("/policy"))["spec"]["rule"] == "least-cost"


async def test_the_page_and_its_files_need_nothing_from_elsewhere(admin: Admin) -> None:
    for path in ("/", "/live.css", "/live.js"):
        addresses = re.findall(r"\w+://\S+?(?=[\"'])", await admin.text(path))
        assert addresses == (["http://www.w3.org/2000/svg"] if path == "/live.js" else []), path
        assert (
            "default-src 'none'; connect-src 'self'; script-src 'self'"
            in admin.headers["Content-Security-Policy"]
        )
    assert re.findall(r"<script[^>]*>| on\w+=", await admin.text("/")) == ['<script src="live.js" defer>']


async def test_markup_in_names_reaches_the_page_as_json_text_alone(admin: Admin) -> None:
    hostile = EndpointStatus(name=EndpointName(HOSTILE), address=HERE.text, scrape_error=HOSTILE)
    admin.status = PickerStatus(endpoints=(hostile,), policy=HOSTILE, rule=HOSTILE)
    admin.ring.append(decision(HOSTILE, chosen=HOSTILE, reason=HOSTILE, model=HOSTILE))
    admin.metrics.on_event(Refused(HOSTILE, NoEndpointError(HOSTILE, reason=HOSTILE)))
    assert "alert(1)" not in await admin.text("/")
    shown = await admin.json("/live")
    assert shown["endpoints"][0]["name"] == HOSTILE
    assert len(shown["requests"]) == 2


async def test_an_address_in_use_is_an_os_error_and_stopping_twice_is_harmless(admin: Admin) -> None:
    second = an_admin(admin.ring, address=admin.address)
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.stop()
    await second.stop()


async def asked_as(admin: Admin, host: str) -> int:
    async with admin.session.get(f"http://{admin.address}/healthz", headers={"Host": host}) as response:
        return response.status


async def test_a_host_name_that_is_not_allowed_is_refused() -> None:
    """A web page could point its own name at this address. It would then read these pages through an
    operator's browser.
    """
    async with Admin(hosts=("picker.gateway.svc",)).running() as admin:
        allowed = (
            "127.0.0.1:9090",
            "[::1]",
            "[fd00::1]:9090",
            "localhost:1",
            "LocalHost.",
            "picker.gateway.svc:9090",
        )
        assert [await asked_as(admin, host) for host in allowed] == [200] * len(allowed)
        refused = (
            "evil.example",
            "evil.example:9090",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "gateway.svc",
        )
        assert [await asked_as(admin, host) for host in refused] == [421] * len(refused)


async def test_the_page_of_missed_tokens_takes_a_window_within_bounds(admin: Admin) -> None:
    for query, status, window_s in (
        ("", 200, 600),
        ("?window=60", 200, 60),
        ("?window=99999", 200, 900),
        ("?window=x", 400, 0),
    ):
        async with admin.session.get(f"http://{admin.address}/explain{query}") as answer:
            assert answer.status == status
            assert (await answer.json()).get("window_s", 0) == window_s


HALF = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
WHOLE = HALF + b"\r\n"


class ReadySender(asyncio.Protocol):
    """Sends `ready` on each new connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"ready\n")


@asynccontextmanager
async def listening(
    accept: Callable[[], asyncio.Protocol] = ReadySender, *, lifetime_s: float = 3600, most: int = 3
) -> AsyncIterator[Address]:
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor(BoundedConnections(accept, limit=most, lifetime_s=lifetime_s).welcome)
    acceptor.start(listener)
    try:
        yield Address("127.0.0.1", listener.getsockname()[1])
    finally:
        await acceptor.stop()


async def test_the_oldest_connection_makes_room_for_a_new_one() -> None:
    async with listening() as address, AsyncExitStack() as stack:
        readers = []
        for _ in range(5):
            reader, _ = await stack.enter_async_context(connection(address))
            assert await reader.readline() == b"ready\n"
            readers.append(reader)
        for closed in readers[:2]:
            assert await closed.read() == b""


async def test_connections_that_have_ended_take_no_place_of_an_open_one() -> None:
    async with listening() as address, connection(address) as (slow, writer):
        assert await slow.readline() == b"ready\n"
        for _ in range(20):
            async with connection(address) as (reader, _):
                assert await reader.readline() == b"ready\n"
        assert not slow.at_eof()
        assert not writer.is_closing()


class LargeSender(asyncio.Protocol):
    """Sends more than the kernel holds and closes, as the server does after an answer."""

    def __init__(self, lost: asyncio.Semaphore) -> None:
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(bytes(2**24))
        transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        self._lost.release()


async def test_clients_that_never_read_their_answers_are_left_after_their_time() -> None:
    lost = asyncio.Semaphore(0)
    async with listening(lambda: LargeSender(lost), lifetime_s=0.1) as address, AsyncExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(socket.create_connection((address.host, address.port)))
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            for _ in range(3):
                await lost.acquire()
        assert sock.fileno() > 0, "the client keeps its end"


@pytest.mark.parametrize("turns", TURNS)
async def test_a_connection_that_arrives_at_a_stop_is_closed_without_an_error(turns: int) -> None:
    admin = an_admin()
    await connect_and_stop(await admin.start(), admin.stop, turns=turns)


async def test_a_thousand_half_sent_requests_do_not_keep_a_probe_out(admin: Admin) -> None:
    address = admin.address
    async with AsyncExitStack() as stack:
        for n in range(1_000):
            _, writer = await stack.enter_async_context(connection(address))
            writer.write(HALF)
            if n % 250 == 0:
                assert (await send_raw(address, WHOLE)).status == 200
        assert (await send_raw(address, WHOLE)).status == 200
        page = await admin.text("/metrics")
        open_fds = next(
            float(line.split()[1]) for line in page.splitlines() if line.startswith("process_open_fds")
        )
        assert open_fds < 1_000 + 64 + 100, "this process holds the clients' ends too"
