"""Envoy with one listener for each way in which it can pass on a request, and servers behind it that report
what came.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import API_VERSION, KIND, Metadata, Policy, PolicySpec
from epp.config.routing import Sampling
from epp.picker.picker import Picker
from epp.transport.server import ExtProcServer
from tests.harness.envoy import ENVOY
from tests.harness.listening import WebServer
from tests.harness.processes import connects, managed_process
from tests.harness.seen import Seen

_EXT = "type.googleapis.com/envoy.extensions"
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


def filter_config(mode: str, epp_cluster: str) -> dict[str, Any]:
    return {
        "@type": f"{_EXT}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": epp_cluster}},
        "processing_mode": {"request_header_mode": "SEND", "response_header_mode": "SEND", **MODES[mode]},
        "message_timeout": "3s",
        "failure_mode_allow": False,
        "allow_mode_override": True,
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
    path = folder / "envoy.json"
    path.write_text(json.dumps(config))
    command: list[str | Path] = [ENVOY, "-c", path, "--use-dynamic-base-id", "--concurrency", "1"]
    async with managed_process("envoy", command, directory=folder) as process:
        await process.wait_ready(lambda: connects("127.0.0.1", port))
        yield


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
