"""The ext_proc service behind the real Envoy: one listener for each way in which Envoy can hand over a request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from epp.config import Listen
from epp.decision import Pick
from epp.errors import PickError
from epp.extproc.response import StreamSettings
from epp.extproc.server import ExtProcServer
from epp.picker import Picker
from epp.policy import API_VERSION, KIND, Metadata, Policy, PolicySpec, Sampling
from epp.types import Address, Endpoint, EndpointName

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

_EXT = "type.googleapis.com/envoy.extensions"
_TRAILERS = {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
_DUPLEX = "FULL_DUPLEX_STREAMED"
MODES: dict[str, dict[str, Any]] = {
    "buffered": {"request_body_mode": "BUFFERED", "response_body_mode": "NONE"},
    "buffered_partial": {"request_body_mode": "BUFFERED_PARTIAL", "response_body_mode": "NONE"},
    "streamed": {"request_body_mode": "STREAMED", "response_body_mode": "STREAMED"},
    "streamed_early": {"request_body_mode": "STREAMED", "response_body_mode": "NONE"},
    "full_duplex": {"request_body_mode": _DUPLEX, "response_body_mode": _DUPLEX, **_TRAILERS},
    "full_duplex_request": {"request_body_mode": _DUPLEX, "response_body_mode": "NONE", **_TRAILERS},
    "none": {"request_body_mode": "NONE", "response_body_mode": "BUFFERED"},
}
READS_BODY = ["buffered", "buffered_partial", "streamed_early", "full_duplex", "full_duplex_request"]
"""Modes in which the pick can know the prompt."""
BUFFER_LIMIT_BYTES = 2 * 2**20
MAX_BODY_BYTES = 6 * 2**20


@dataclass
class Seen:
    """An observer that keeps what it was told."""

    picks: list[Pick] = field(default_factory=list)
    over: list[Pick] = field(default_factory=list)
    mismatches: int = 0
    refusals: list[PickError] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def parsed(self, *, seconds: float, size_bytes: int) -> None:
        assert seconds >= 0
        assert size_bytes > 0

    def picked(self, pick: Pick, *, seconds: float) -> None:
        self.picks.append(pick)

    def refused(self, request_id: str, error: PickError) -> None:
        self.refusals.append(error)

    def responded(self, pick: Pick, *, mismatch: bool) -> None:
        self.mismatches += mismatch

    def ended(self, pick: Pick) -> None:
        self.over.append(pick)

    def protocol_error(self, reason: str) -> None:
        self.faults.append(reason)


@dataclass
class Rig:
    ports: dict[str, int]
    """Envoy's listener of each mode."""
    upstreams: list[int]
    server: ExtProcServer
    picker: Picker
    seen: Seen
    client: aiohttp.ClientSession

    def url(self, mode: str, path: str = "/v1/completions") -> str:
        return f"http://127.0.0.1:{self.ports[mode]}{path}"

    async def settled(self) -> None:
        """Wait until every pick is over and every stream gone."""
        async with asyncio.timeout(10):
            while self.server.streams or len(self.seen.over) < len(self.seen.picks):  # noqa: ASYNC110 - it is in the product
                await asyncio.sleep(0.01)
        assert all(s.in_flight == 0 for s in self.picker.fleet.states())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


TOLD = web.AppKey("told", asyncio.Event)


async def serve_upstream(request: web.Request) -> web.StreamResponse:
    """Tells what reached it: its port, the size and edges of the body, the headers that matter."""
    body = await request.read()
    port = request.transport.get_extra_info("sockname")[1] if request.transport else 0
    told = {
        "port": port,
        "size": len(body),
        "sum": sum(body),
        "destination": request.headers.get("x-gateway-destination-endpoint", ""),
        "request_id": request.headers.get("x-request-id", ""),
    }
    if request.path == "/hang":
        await asyncio.sleep(60)
    if request.path == "/until-told":
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun,")
        await request.app[TOLD].wait()
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
    return web.json_response(told)


def filter_config(mode: str, epp_cluster: str) -> dict[str, Any]:
    return {
        "@type": f"{_EXT}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": epp_cluster}},
        "processing_mode": {"request_header_mode": "SEND", "response_header_mode": "SEND", **MODES[mode]},
        "message_timeout": "3s",
        "failure_mode_allow": False,
        "allow_mode_override": mode != "streamed_early",
        "send_body_without_waiting_for_header_response": mode == "streamed_early",
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }


def listener(mode: str, port: int) -> dict[str, Any]:
    manager = {
        "@type": f"{_EXT}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": mode,
        "http_protocol_options": {"enable_trailers": True},
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "v",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "models", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": filter_config(mode, "epp")},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_EXT}.filters.http.router.v3.Router"},
            },
        ],
    }
    return {
        "name": mode,
        "address": address(port),
        "per_connection_buffer_limit_bytes": BUFFER_LIMIT_BYTES,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def cluster(name: str, ports: list[int], **more: Any) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": address(p)}} for p in ports]
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        **more,
    }


def policy_extension(name: str, **config: Any) -> dict[str, Any]:
    kind = "".join(part.capitalize() for part in name.split("_"))
    typed = {"@type": f"{_EXT}.load_balancing_policies.{name}.v3.{kind}", **config}
    return {
        "typed_extension_config": {"name": f"envoy.load_balancing_policies.{name}", "typed_config": typed}
    }


def bootstrap(ports: dict[str, int], upstreams: list[int], epp_port: int) -> dict[str, Any]:
    override = policy_extension(
        "override_host",
        override_host_sources=[
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
        ],
        fallback_policy={"policies": [policy_extension("round_robin")]},
    )
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_EXT}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    return {
        "static_resources": {
            "listeners": [listener(mode, port) for mode, port in ports.items()],
            "clusters": [
                cluster("models", upstreams, load_balancing_policy={"policies": [override]}),
                cluster("epp", [epp_port], typed_extension_protocol_options=http2),
            ],
        }
    }


@contextlib.asynccontextmanager
async def running_envoy(config: dict[str, Any], folder: Path, *, port: int) -> AsyncIterator[None]:
    path, log = folder / "envoy.json", folder / "envoy.log"
    path.write_text(json.dumps(config))
    command = [str(Path(sys.executable).with_name("envoy")), "-c", str(path), "--use-dynamic-base-id"]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, "--concurrency", "1", stdout=out, stderr=out, start_new_session=True
        )
    try:
        async with asyncio.timeout(30):
            while True:
                assert process.returncode is None, log.read_text()
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.05)
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def running_upstreams(count: int, *, told: asyncio.Event | None = None) -> AsyncIterator[list[int]]:
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{tail:.*}", serve_upstream)
    app[TOLD] = told or asyncio.Event()
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    ports = [free_port() for _ in range(count)]
    for port in ports:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield ports
    finally:
        await runner.cleanup()


def make_picker(ports: list[int], *, share: float = 0.0, debug_header: str = "x-debug-pick") -> Picker:
    spec = PolicySpec(debug_header=debug_header, sampling=Sampling(share=share))
    policy = Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name="test"), spec=spec)
    picker = Picker(policy, rng=random.Random(1))
    endpoints = [
        Endpoint(name=EndpointName(f"m{i}"), address=Address("127.0.0.1", port))
        for i, port in enumerate(ports)
    ]
    picker.set_endpoints(endpoints, now=time.monotonic())
    return picker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running_upstreams(3) as upstreams:
        seen, picker = Seen(), make_picker(upstreams)
        server = ExtProcServer(
            picker,
            seen,
            listen=Listen(address="127.0.0.1:0"),
            settings=StreamSettings(max_body_bytes=MAX_BODY_BYTES, streamed_hold_bytes=256 * 1024),
        )
        await server.start()
        ports = {mode: free_port() for mode in MODES}
        config = bootstrap(ports, upstreams, server.port)
        folder = tmp_path_factory.mktemp("envoy")
        async with running_envoy(config, folder, port=ports["none"]), aiohttp.ClientSession() as client:
            yield Rig(ports, upstreams, server, picker, seen, client)
        await server.stop()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def quiet_end(rig: Rig) -> AsyncIterator[None]:
    """After each test nothing is left booked, and nothing that came was odd."""
    rig.seen.faults.clear()
    yield
    await rig.settled()
    rig.server.check_integrity()
    assert rig.seen.faults == []


def completion(size_bytes: int, *, tag: str) -> bytes:
    prompt = (f"{tag} " + "lorem ipsum dolor " * (size_bytes // 18 + 1))[:size_bytes]
    return json.dumps({"model": "m", "prompt": prompt}).encode()


async def post(rig: Rig, mode: str, body: bytes, **headers: str) -> dict[str, Any]:
    async with rig.client.post(rig.url(mode), data=io.BytesIO(body), headers=headers) as response:
        assert response.status == 200, await response.text()
        told: dict[str, Any] = await response.json()
        return told


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size_bytes", [1_000, 150_000])
async def test_a_request_reaches_the_picked_server_with_its_body_untouched(
    rig: Rig, mode: str, size_bytes: int
) -> None:
    body = completion(size_bytes, tag=mode)
    told = await post(rig, mode, body, **{"x-request-id": f"{mode}-{size_bytes}"})
    pick = rig.seen.picks[-1]
    assert told["size"] == len(body)
    assert told["sum"] == sum(body)
    assert told["port"] == pick.destinations[0].port
    assert told["destination"] == ",".join(map(str, pick.destinations))
    assert len(pick.destinations) == 3
    assert pick.decision.request_id == told["request_id"]
    assert pick.decision.kind == ("completions" if mode in READS_BODY else "other")
    await rig.settled()
    assert pick.decision.status == 200
    assert pick.decision.outcome == "ended"
    assert pick.decision.served == pick.destinations[0]


@pytest.mark.parametrize("mode", MODES)
async def test_requests_without_a_body_are_routed_by_load(rig: Rig, mode: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("DELETE", "/x")):
        async with rig.client.request(method, rig.url(mode, path)) as response:
            told = await response.json()
        pick = rig.seen.picks[-1]
        assert told["port"] == pick.destinations[0].port
        assert pick.decision.kind == "other"
        assert told["request_id"] == pick.decision.request_id != ""


@pytest.mark.parametrize("mode", MODES)
async def test_a_destination_that_the_client_sends_never_decides(rig: Rig, mode: str) -> None:
    wrong = {"x-gateway-destination-endpoint": "10.9.9.9:1"}
    told = await post(rig, mode, completion(100, tag="mine"), **wrong)
    assert told["destination"] == ",".join(map(str, rig.seen.picks[-1].destinations))
    async with rig.client.get(rig.url(mode), headers=wrong) as response:
        assert (await response.json())["destination"] == ",".join(map(str, rig.seen.picks[-1].destinations))


@pytest.mark.parametrize("mode", READS_BODY)
async def test_the_same_prompt_goes_where_its_prefix_is(rig: Rig, mode: str) -> None:
    body = completion(8_000, tag=f"again-{mode}")
    first = await post(rig, mode, body)
    assert {(await post(rig, mode, body))["port"] for _ in range(4)} == {first["port"]}
    assert rig.seen.picks[-1].decision.matched_tokens > 1_000


@pytest.mark.parametrize("mode", ["buffered", "streamed_early", "full_duplex", "full_duplex_request"])
async def test_a_body_cut_into_chunks_as_it_comes_gets_the_same_pick(rig: Rig, mode: str) -> None:
    body = completion(20_000, tag=f"chunks-{mode}")
    whole = await post(rig, mode, body)

    async def trickle() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 3_000):
            yield body[start : start + 3_000]
            await asyncio.sleep(0)

    async with rig.client.post(rig.url(mode), data=trickle()) as response:
        told = await response.json()
    assert (told["port"], told["size"], told["sum"]) == (whole["port"], len(body), sum(body))
    assert rig.seen.picks[-1].decision.kind == "completions"


@pytest.mark.parametrize(
    ("mode", "size_bytes", "kind"),
    [
        ("buffered", BUFFER_LIMIT_BYTES - 65_536, "completions"),
        ("buffered_partial", BUFFER_LIMIT_BYTES + 2**20, ""),  # What Envoy had read by then.
        ("streamed", BUFFER_LIMIT_BYTES + 2**20, "other"),
        ("streamed_early", BUFFER_LIMIT_BYTES + 2**20, "other"),
        ("full_duplex", BUFFER_LIMIT_BYTES + 2**20, "completions"),
        ("none", BUFFER_LIMIT_BYTES + 2**20, "other"),
    ],
)
async def test_large_bodies_arrive_whole_whatever_the_mode_lets_the_picker_read(
    rig: Rig, mode: str, size_bytes: int, kind: str
) -> None:
    body = completion(size_bytes, tag="large")
    told = await post(rig, mode, body)
    assert (told["size"], told["sum"]) == (len(body), sum(body))
    assert not kind or rig.seen.picks[-1].decision.kind == kind
    assert told["port"] == rig.seen.picks[-1].destinations[0].port


async def test_a_body_over_envoys_own_limit_is_refused_and_leaves_nothing_behind(rig: Rig) -> None:
    picks = len(rig.seen.picks)
    body = io.BytesIO(completion(3 * 2**20, tag="over"))
    async with rig.client.post(rig.url("buffered"), data=body) as response:
        assert response.status == 413
    assert len(rig.seen.picks) == picks


@pytest.mark.parametrize("mode", ["full_duplex", "buffered", "streamed"])
async def test_a_body_declared_over_the_pickers_limit_gets_413(rig: Rig, mode: str) -> None:
    body = io.BytesIO(completion(MAX_BODY_BYTES, tag="over"))
    async with rig.client.post(rig.url(mode), data=body) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("mode", READS_BODY)
async def test_bad_json_gets_400_in_openais_shape(rig: Rig, mode: str) -> None:
    async with rig.client.post(rig.url(mode), data=b'{"model": "m", "prompt": ') as response:
        assert response.status == 400
        assert response.content_type == "application/json"
        error = (await response.json())["error"]
    assert error["code"] == "bad_json"
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None
    assert error["message"]


@pytest.mark.parametrize("mode", MODES)
async def test_no_ready_endpoint_gets_503_with_and_without_a_body(rig: Rig, mode: str) -> None:
    endpoints = rig.picker.endpoints()
    rig.picker.set_endpoints([], now=time.monotonic())
    try:
        for method, body in (("POST", completion(100, tag="none")), ("GET", None)):
            async with rig.client.request(method, rig.url(mode), data=body) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "no_ready_endpoint"
    finally:
        rig.picker.set_endpoints(endpoints, now=time.monotonic())


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_goes_away_releases_its_booking(rig: Rig, mode: str) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await rig.client.post(rig.url(mode, "/hang"), data=b"{}", timeout=aiohttp.ClientTimeout(total=0.3))
    await rig.settled()
    assert rig.seen.over[-1].decision.outcome == "aborted"


@pytest.mark.parametrize("mode", ["buffered", "full_duplex"])
async def test_a_dead_server_is_told_as_failed(rig: Rig, mode: str) -> None:
    endpoints = rig.picker.endpoints()
    dead = Endpoint(name=EndpointName("dead"), address=Address("127.0.0.1", 1))
    rig.picker.set_endpoints([dead], now=time.monotonic())
    try:
        async with rig.client.post(rig.url(mode), data=completion(50, tag="dead")) as response:
            # Envoy does not know the address, so its fallback policy serves, and says who it was.
            assert response.status == 200
        await rig.settled()
        assert rig.seen.over[-1].decision.served != dead.address
        assert rig.seen.mismatches >= 1
    finally:
        rig.picker.set_endpoints(endpoints, now=time.monotonic())


@pytest.mark.parametrize("mode", ["buffered", "buffered_partial", "full_duplex", "streamed", "none"])
async def test_a_sampled_answer_is_read_and_reaches_the_client_unchanged(rig: Rig, mode: str) -> None:
    policy = rig.picker.policy
    sampled = Policy(
        api_version=API_VERSION, kind=KIND, metadata=Metadata(name="all"), spec=PolicySpec(sampling=Sampling(share=1))
    )  # fmt: skip
    rig.picker.set_policy(sampled, now=time.monotonic())
    try:
        body = b'{"model": "m", "prompt": "sampled", "stream": true}'
        async with rig.client.post(rig.url(mode, "/stream"), data=body) as response:
            text = await response.text()
    finally:
        rig.picker.set_policy(policy, now=time.monotonic())
    assert text.count("data: ") == 6
    await rig.settled()
    assert rig.seen.over[-1].decision.outcome == "ended"


async def test_the_debug_header_brings_the_decision_back(rig: Rig) -> None:
    async with rig.client.post(
        rig.url("buffered"), data=completion(100, tag="debug"), headers={"x-debug-pick": "1"}
    ) as response:
        assert "chosen=m" in response.headers["x-prefix-gateway-decision"]
    async with rig.client.post(rig.url("buffered"), data=completion(100, tag="debug")) as response:
        assert "x-prefix-gateway-decision" not in response.headers


@pytest.mark.parametrize("mode", MODES)
async def test_a_body_that_ends_in_trailers_arrives_whole(rig: Rig, mode: str) -> None:
    body = completion(90_000, tag=f"trailers-{mode}")
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.ports[mode])
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    writer.write(head.encode())
    for start in range(0, len(body), 40_000):
        piece = body[start : start + 40_000]
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    writer.write(b"0\r\nx-checksum: 1\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert f'"size": {len(body)}, "sum": {sum(body)}'.encode() in answer
    assert rig.seen.picks[-1].decision.kind == ("completions" if mode in READS_BODY else "other")


async def test_a_drain_cuts_no_answer_although_the_gateway_fails_closed(tmp_path: Path) -> None:
    told = asyncio.Event()
    async with running_upstreams(2, told=told) as upstreams:
        seen, picker = Seen(), make_picker(upstreams)
        server = ExtProcServer(picker, seen, listen=Listen(address="127.0.0.1:0"), settings=StreamSettings())
        await server.start()
        ports = {mode: free_port() for mode in ("buffered", "full_duplex_request")}
        config = bootstrap(ports, upstreams, server.port)
        async with running_envoy(config, tmp_path, port=ports["buffered"]), aiohttp.ClientSession() as client:
            answers = [
                await client.post(f"http://127.0.0.1:{port}/until-told", data=b"{}")
                for port in ports.values()
                for _ in range(4)
            ]
            for answer in answers:
                assert await answer.content.readexactly(6) == b"begun,"
            assert server.streams == len(answers)
            await server.drain(5)
            await server.stop()
            told.set()
            assert [await answer.text() for answer in answers] == ["ended"] * len(answers)
        assert [p.decision.outcome for p in seen.over] == ["detached"] * len(answers)
