"""A real OpenTelemetry collector, compiled once from its Go modules, and the spans that it forwards.

It receives OTLP over gRPC and over HTTP, and sends the spans as JSON to this process. So a test reads spans
as the collector understood them. The program is cached outside the checkout under the hash of its sources.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from aiohttp import web

from tests.harness.cached_builds import built_elsewhere, cache_folder, content_key, only_builder, run
from tests.harness.listening import WebServer
from tests.harness.ports import free_ports
from tests.harness.processes import connects, managed_process, wait_until

_SOURCES: Final = Path(__file__).parent / "collector_go"
_REQUIRE: Final = "PREFIX_GATEWAY_REQUIRE_CLUSTER"
"""The variable that is set where CI runs everything."""


def collector_program() -> Path:
    """Return the program's path. Build the program first if it is not cached. Skip the test if no Go is
    installed.
    """
    files = ("go.mod", "go.sum", "main.go")
    final = cache_folder() / f"collector-{content_key(*((_SOURCES / name).read_bytes() for name in files))}"
    if (final / "collector").exists():
        return final / "collector"
    if shutil.which("go") is None:
        said = "the collector is built with Go, which is not installed"
        pytest.fail(said) if os.environ.get(_REQUIRE) else pytest.skip(said)
    with only_builder("collector", progress=print):
        if not final.exists():
            with built_elsewhere(final) as folder:
                flags = ("-trimpath", "-ldflags=-s -w", "-o", str(folder / "collector"))
                run("go", "build", *flags, ".", cwd=_SOURCES, env={"CGO_ENABLED": "0"})
    return final / "collector"


@dataclass(frozen=True, slots=True)
class Span:
    """A span as in OTLP's JSON."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    kind: int
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """A running collector, and the spans that it forwarded."""

    grpc_port: int
    http_port: int
    spans: list[Span] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    """Everything that the collector forwarded, as bytes."""

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    async def wait_for(self, name: str, *, count: int) -> list[Span]:
        await wait_until(
            lambda: len(self.named(name)) >= count,
            what=f"{count} spans {name}, of {[s.name for s in self.spans]}",
        )
        return self.named(name)


@asynccontextmanager
async def running_collector(directory: Path) -> AsyncIterator[Collector]:
    program = collector_program()
    grpc_port, http_port = free_ports(2)
    collector = Collector(grpc_port, http_port)

    async def take(request: web.Request) -> web.Response:
        payload = await request.read()
        collector.payloads.append(payload)
        collector.spans += _spans(json.loads(payload))
        return web.json_response({})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/traces", take)
    sink = WebServer(app)
    sink_port = await sink.listen()
    config = directory / "collector.yaml"
    config.write_text(yaml.safe_dump(_config(grpc_port, http_port, sink_port)))
    try:
        async with managed_process(
            "collector", [program, "--config", config], directory=directory
        ) as process:

            async def ready() -> bool:
                return await connects("127.0.0.1", grpc_port) and await connects("127.0.0.1", http_port)

            await process.wait_ready(ready)
            yield collector
    finally:
        await sink.stop()


def _config(grpc_port: int, http_port: int, sink_port: int) -> dict[str, Any]:
    protocols = {
        "grpc": {"endpoint": f"127.0.0.1:{grpc_port}"},
        "http": {"endpoint": f"127.0.0.1:{http_port}"},
    }
    exporter = {
        "endpoint": f"http://127.0.0.1:{sink_port}",
        "encoding": "json",
        "compression": "none",
        "sending_queue": {"enabled": False},
    }
    return {
        "receivers": {"otlp": {"protocols": protocols}},
        "exporters": {"otlp_http": exporter},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_http"]}},
        },
    }


def _spans(document: dict[str, Any]) -> list[Span]:
    return [
        Span(
            name=span["name"],
            trace_id=span["traceId"],
            span_id=span["spanId"],
            parent_id=span.get("parentSpanId", ""),
            service=_attributes(resource["resource"]).get("service.name", ""),
            kind=span["kind"],
            attributes=_attributes(span),
        )
        for resource in document["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: _value(one["value"]) for one in holder.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    ((kind, told),) = value.items()
    return int(told) if kind == "intValue" else told
