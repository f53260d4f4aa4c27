"""The ext_proc service behind the real Envoy, in each way in which Envoy can hand over a request."""

import asyncio
import contextlib
import copy
import io
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import PolicySpec, Sampling
from epp.picker.picker import Picker
from epp.protocol.settings import StreamSettings
from epp.transport.server import ExtProcServer
from tests.harness.envoy import bootstrap_document, running_envoy
from tests.harness.gateway import config_in, write_eds
from tests.harness.listening import WebServer
from tests.harness.ports import free_port
from tests.harness.processes import wait_until
from tests.harness.seen import Seen
from tests.integration.test_extproc_server import serving_picker
from tests.invariants.transport import check_server
from tests.unit.picker.picker_questions import policy_of

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="module"),
]

_TRAILERS = {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
_DUPLEX = "FULL_DUPLEX_STREAMED"
MODES: dict[str, dict[str, Any]] = {
    "buffered": {"request_body_mode": "BUFFERED", "response_body_mode": "NONE"},
    "buffered_partial": {"request_body_mode": "BUFFERED_PARTIAL", "response_body_mode": "NONE"},
    "streamed": {"request_body_mode": "STREAMED", "response_body_mode": "STREAMED"},
    "full_duplex": {"request_body_mode": _DUPLEX, "response_body_mode": _DUPLEX, **_TRAILERS},
    "full_duplex_request": {"request_body_mode": _DUPLEX, "response_body_mode": "NONE", **_TRAILERS},
    "none": {"request_body_mode": "NONE", "response_body_mode": "BUFFERED"},
}
READS_BODY = ["buffered", "buffered_partial", "full_duplex", "full_duplex_request"]
"""The modes in which the pick can know the prompt."""
BUFFER_LIMIT_BYTES = 2 * 2**20
MAX_BODY_BYTES = 6 * 2**20


@dataclass
class EnvoyRig:
    ports: dict[str, int]
    """Envoy's listener of each mode."""
    server: ExtProcServer
    picker: Picker
    seen: Seen
    client: aiohttp.ClientSession

    def url(self, mode: str, path: str = "/v1/completions") -> str:
        return f"http://127.0.0.1:{self.ports[mode]}{path}"

    async def settled(self) -> None:
        """Wait until every pick is over and every stream is gone."""
        await wait_until(
            lambda: not self.server.streams.live and len(self.seen.over) >= len(self.seen.picks),
            what="all is over",
        )
        assert all(s.in_flight == 0 for s in self.picker.fleet.states())


GO_ON = web.AppKey("go on", asyncio.Event)


async def serve_upstream(request: web.Request) -> web.StreamResponse:
    """Report what reached the server: its port, the size and both ends of the body, the headers that
    matter.
    """
    body = await request.read()
    port = request.transport.get_extra_info("sockname")[1] if request.transport else 0
    received = {
        "port": port,
        "size": len(body),
        "sum": sum(body),
        "destination": request.headers.get("x-gateway-destination-endpoint", ""),
        "request_id": request.headers.get("x-request-id", ""),
    }
    if request.path == "/until-go-on":
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun,")
        await request.app[GO_ON].wait()
        await response.write(b"ended")
        return response
    if request.path == "/stream":
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for i in range(5):
            chunk = {"choices": [{"index": 0, "text": f"t{i}"}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
    return web.json_response(received)


@contextlib.asynccontextmanager
async def running_gateways(
    directory: Path, modes: Iterable[str], *, upstreams: list[int], picker_port: int
) -> AsyncIterator[dict[str, int]]:
    """Run an Envoy with a copy of our own listener for each mode. Yield the port of each."""
    config = config_in(
        directory,
        listen={"address": f"127.0.0.1:{picker_port}"},
        envoy={"failOpen": False, "maxBodyBytes": BUFFER_LIMIT_BYTES},
    )
    write_eds(config.envoy.eds_file, [Address("127.0.0.1", port) for port in upstreams])
    document = bootstrap_document(config)
    [listener] = document["static_resources"]["listeners"]
    ports = {mode: free_port() for mode in modes}
    document["static_resources"]["listeners"] = [
        _listener(listener, mode, port=port) for mode, port in ports.items()
    ]
    async with running_envoy(config, directory=directory, document=document):
        yield ports


def _listener(ours: dict[str, Any], mode: str, *, port: int) -> dict[str, Any]:
    listener = copy.deepcopy(ours)
    listener["name"] = mode
    listener["address"]["socket_address"]["port_value"] = port
    [manager] = [part["typed_config"] for part in listener["filter_chains"][0]["filters"]]
    for each in manager["http_filters"]:
        if each["name"] == "envoy.filters.http.ext_proc":
            each["typed_config"]["processing_mode"] |= MODES[mode]
    manager["http_protocol_options"]["enable_trailers"] = True
    return listener


@contextlib.asynccontextmanager
async def running_upstreams(count: int, *, go_on: asyncio.Event | None = None) -> AsyncIterator[list[int]]:
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{tail:.*}", serve_upstream)
    app[GO_ON] = go_on or asyncio.Event()
    server = WebServer(app)
    try:
        yield [await server.listen() for _ in range(count)]
    finally:
        await server.stop()


def picker_of_ports(ports: list[int]) -> Picker:
    spec = PolicySpec(sampling=Sampling(share=0))
    picker = Picker(policy_of(spec), rng=random.Random(1))
    endpoints = [Endpoint(EndpointName(f"m{i}"), Address("127.0.0.1", port)) for i, port in enumerate(ports)]
    picker.news.set_endpoints(endpoints, now=time.monotonic())
    return picker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnvoyRig]:
    folder, settings = tmp_path_factory.mktemp("envoy"), StreamSettings(max_body_bytes=MAX_BODY_BYTES)
    async with (
        running_upstreams(3) as upstreams,
        serving_picker(picker=picker_of_ports(upstreams), settings=settings) as asked,
        running_gateways(folder, MODES, upstreams=upstreams, picker_port=asked.server.port) as ports,
        aiohttp.ClientSession() as client,
    ):
        yield EnvoyRig(ports, asked.server, asked.picker, asked.seen, client)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def quiet_end(rig: EnvoyRig) -> AsyncIterator[None]:
    """Check after each test that nothing is left booked and that no message was odd."""
    rig.seen.faults.clear()
    yield
    await rig.settled()
    check_server(rig.server)
    assert rig.seen.faults == []


def long_completion(size_bytes: int, *, tag: str) -> bytes:
    prompt = (f"{tag} " + "lorem ipsum dolor " * (size_bytes // 18 + 1))[:size_bytes]
    return json.dumps({"model": "m", "prompt": prompt}).encode()


async def post(rig: EnvoyRig, mode: str, body: bytes, **headers: str) -> dict[str, Any]:
    async with rig.client.post(rig.url(mode), data=io.BytesIO(body), headers=headers) as response:
        assert response.status == 200, await response.text()
        received: dict[str, Any] = await response.json()
        return received


@pytest.mark.core
@pytest.mark.parametrize(
    ("mode", "size_bytes"),
    [
        *itertools.product(MODES, [1_000, 150_000]),
        ("buffered", BUFFER_LIMIT_BYTES - 65_536),
        *itertools.product(["streamed", "full_duplex", "none"], [BUFFER_LIMIT_BYTES + 2**20]),
    ],
)
async def test_a_request_reaches_the_picked_server_with_its_body_untouched(
    rig: EnvoyRig, mode: str, size_bytes: int
) -> None:
    body = long_completion(size_bytes, tag=mode)
    received = await post(rig, mode, body, **{"x-request-id": f"{mode}-{size_bytes}"})
    pick = rig.seen.picks[-1]
    assert received["size"] == len(body)
    assert received["sum"] == sum(body)
    assert received["port"] == pick.destinations[0].port
    assert received["destination"] == ",".join(map(str, pick.destinations))
    assert len(pick.destinations) == 3
    assert pick.decision.request_id == received["request_id"]
    assert pick.decision.kind == ("completions" if mode in READS_BODY else "other")
    await rig.settled()
    assert pick.decision.status == 200
    assert pick.decision.outcome == "ended"
    assert pick.decision.served == pick.destinations[0]


async def test_a_body_that_is_read_in_part_arrives_whole(rig: EnvoyRig) -> None:
    """Its end comes after the pick: Envoy forgets an end that comes between its question and the answer."""
    picks = len(rig.seen.picks)
    body = long_completion(BUFFER_LIMIT_BYTES + 2**20, tag="partial")

    async def in_two_parts() -> AsyncIterator[bytes]:
        yield body[: BUFFER_LIMIT_BYTES + 2**19]
        await wait_until(lambda: len(rig.seen.picks) > picks, what="the pick")
        yield body[BUFFER_LIMIT_BYTES + 2**19 :]

    async with rig.client.post(rig.url("buffered_partial"), data=in_two_parts()) as response:
        received = await response.json()
    assert (received["size"], received["sum"]) == (len(body), sum(body))
    assert received["port"] == rig.seen.picks[-1].destinations[0].port


@pytest.mark.parametrize("mode", ["buffered", "buffered_partial", "full_duplex", "streamed", "none"])
async def test_a_sampled_answer_is_read_and_reaches_the_client_unchanged(rig: EnvoyRig, mode: str) -> None:
    policy = rig.picker.policy
    rig.picker.set_policy(policy_of(PolicySpec(sampling=Sampling(share=1))))
    try:
        body = b'{"model": "m", "prompt": "sampled", "stream": true}'
        async with rig.client.post(rig.url(mode, "/stream"), data=body) as response:
            text = await response.text()
    finally:
        rig.picker.set_policy(policy)
    assert text.count("data: ") == 6
    await rig.settled()
    assert rig.seen.over[-1].decision.outcome == "ended"


async def test_a_drain_cuts_no_answer_although_the_gateway_fails_closed(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    modes = ("buffered", "full_duplex_request")
    async with (
        running_upstreams(2, go_on=go_on) as upstreams,
        serving_picker(picker=picker_of_ports(upstreams)) as asked,
        running_gateways(tmp_path, modes, upstreams=upstreams, picker_port=asked.server.port) as ports,
        aiohttp.ClientSession() as client,
    ):
        answers = [
            await client.post(f"http://127.0.0.1:{port}/until-go-on", data=b"{}")
            for port in ports.values()
            for _ in range(4)
        ]
        for answer in answers:
            assert await answer.content.readexactly(6) == b"begun,"
        assert len(asked.server.streams.live) == len(answers)
        await asked.server.drain(5)
        await asked.server.stop()
        go_on.set()
        assert [await answer.text() for answer in answers] == ["ended"] * len(answers)
        assert [p.decision.outcome for p in asked.seen.over] == ["ended"] * len(answers)


@pytest.fixture
def overloaded(rig: EnvoyRig) -> Iterator[None]:
    """Make the picker believe that every request has waited for too long. Other tests do not notice."""
    believed = rig.server.streams.overload
    skips = believed.skips
    believed.skips = lambda **_: True  # type: ignore[method-assign]
    yield
    believed.skips = skips  # type: ignore[method-assign]


@pytest.mark.core
@pytest.mark.parametrize("size", [1_000, 400_000])
@pytest.mark.parametrize("mode", MODES)
async def test_picker_with_too_much_to_do_answers_at_once_and_body_arrives_whole(
    rig: EnvoyRig, overloaded: None, mode: str, size: int
) -> None:
    body = long_completion(size, tag=f"overload {mode}")
    received = await post(rig, mode, body)
    assert (received["size"], received["sum"]) == (len(body), sum(body))
    await rig.settled()
    decision = rig.seen.picks[-1].decision
    assert (decision.reason, decision.unread, decision.matched_tokens) == ("overload", "overload", 0)
    assert decision.outcome == ("ended" if mode.startswith("full_duplex") else "detached")
    assert received["port"] == rig.seen.picks[-1].destinations[0].port
