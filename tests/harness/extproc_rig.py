"""Envoy with one listener for each way in which it can pass on a request, and servers behind it that report
what came.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import API_VERSION, KIND, Metadata, Policy, PolicySpec
from epp.config.routing import Sampling
from epp.picker.picker import Picker
from epp.serve.envoy import files
from epp.transport.server import ExtProcServer
from tests.harness.envoy import bootstrap_document, running_envoy
from tests.harness.gateway import as_endpoints, config_in
from tests.harness.listening import WebServer
from tests.harness.ports import free_port
from tests.harness.seen import Seen

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
    upstreams: list[int]
    server: ExtProcServer
    picker: Picker
    seen: Seen
    client: aiohttp.ClientSession

    def url(self, mode: str, path: str = "/v1/completions") -> str:
        return f"http://127.0.0.1:{self.ports[mode]}{path}"

    async def settled(self) -> None:
        """Wait until every pick is over and every stream is gone."""
        async with asyncio.timeout(60):
            while self.server.streams or len(self.seen.over) < len(self.seen.picks):  # noqa: ASYNC110 - it is in the product
                await asyncio.sleep(0.01)
        assert all(s.in_flight == 0 for s in self.picker.fleet.states())


TOLD = web.AppKey("told", asyncio.Event)


async def serve_upstream(request: web.Request) -> web.StreamResponse:
    """Report what reached the server: its port, the size and both ends of the body, the headers that
    matter.
    """
    body = await request.read()
    port = request.transport.get_extra_info("sockname")[1] if request.transport else 0
    told = {
        "port": port,
        "size": len(body),
        "sum": sum(body),
        "destination": request.headers.get("x-gateway-destination-endpoint", ""),
        "request_id": request.headers.get("x-request-id", ""),
    }
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


@contextlib.asynccontextmanager
async def running_gateways(
    directory: Path, modes: Iterable[str], *, upstreams: list[int], picker_port: int
) -> AsyncIterator[dict[str, int]]:
    """Run an Envoy with a copy of our own listener for each mode. Yield the port of each."""
    config = config_in(
        directory,
        listen={"address": f"127.0.0.1:{picker_port}"},
        holdStreams=False,
        envoy={"failOpen": False, "maxBodyBytes": BUFFER_LIMIT_BYTES},
    )
    files.write_endpoints(
        Path(config.envoy.eds_file), as_endpoints([Address("127.0.0.1", port) for port in upstreams])
    )
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
async def running_upstreams(count: int, *, told: asyncio.Event | None = None) -> AsyncIterator[list[int]]:
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{tail:.*}", serve_upstream)
    app[TOLD] = told or asyncio.Event()
    server = WebServer(app)
    try:
        yield [await server.listen() for _ in range(count)]
    finally:
        await server.stop()


def picker_of_ports(ports: list[int]) -> Picker:
    spec = PolicySpec(sampling=Sampling(share=0))
    policy = Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name="test"), spec=spec)
    picker = Picker(policy, rng=random.Random(1))
    endpoints = [
        Endpoint(name=EndpointName(f"m{i}"), address=Address("127.0.0.1", port))
        for i, port in enumerate(ports)
    ]
    picker.set_endpoints(endpoints, now=time.monotonic())
    return picker
