"""What clients can reach through the real Envoy on our bootstrap: never the model servers' pages for operators."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from epp.config import BLOCKED_PATHS
from epp.types import Address
from tests.harness.gateway import Bench, running_bootstrap

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = pytest.mark.envoy

DISGUISES = [
    "/metrics",
    "/metrics/",
    "/metrics/x",
    "/metrics?a=b",
    "/metrics/?a=b",
    "//metrics",
    "///metrics//",
    "/./metrics",
    "/v1/../metrics",
    "/v1/..//metrics",
    "/%2e/metrics",
    "/v1/%2e%2E/metrics",
    "/v1/..%2fmetrics",
    "/v1/%2e%2e%2Fmetrics",
    "/%2fmetrics",
    "/%2Fmetrics%2f",
    "/%5cmetrics",
    "\\metrics",
    "/v1\\..\\metrics",
    "/%6detrics",
    "/%6D%65%74rics",
    "/metrics%2f..%2fmetrics",
    "/metrics#fragment",
    "/metrics%23fragment",
    "/metrics%3fa=b",
    "/metrics;a=b",
    "/metrics%00",
    "/metrics%20",
    *("/" + "".join(f"%{ord(c):02x}" for c in path[1:]) for path in BLOCKED_PATHS),
]


async def ask(address: Address, path: str) -> int | None:
    """The status; None when the request was not understood. The path goes out byte for byte, which no HTTP client does."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n".encode())
        words = (await reader.readline()).split(maxsplit=2)
        return int(words[1]) if words else None
    finally:
        writer.close()


async def test_paths_for_operators_are_404_in_json_and_go_nowhere(bench: Bench) -> None:
    bench.picker.always(bench.backends[0].address)
    for path in BLOCKED_PATHS:
        for method in ("GET", "POST"):
            reply = await bench.client.request(method, path)
            assert reply.status == 404
            assert reply.headers["content-type"] == "application/json"
            assert reply.json()["error"] == {
                "code": 404,
                "message": "not served by this gateway",
                "param": None,
                "type": "not_found_error",
            }
    assert all(not backend.received for backend in bench.backends)
    assert bench.picker.exchanges == []
    assert await bench.envoy.bypassed() == 0


async def test_no_spelling_of_a_blocked_path_gets_to_a_server_that_would_know_it(bench: Bench) -> None:
    bench.picker.always(bench.backends[0].address)
    gateway = Address.parse(bench.config.envoy.listen)
    statuses = {path: await ask(gateway, path) for path in DISGUISES}
    reached = [received.path for received in bench.backends[0].received]
    names = {re.sub("/+", "/", path).rstrip("/") for path in reached}
    assert names.isdisjoint(BLOCKED_PATHS)
    assert len(reached) == 4, "names of their own, such as `metrics#fragment`, are not blocked"
    assert statuses["/metrics#fragment"] == 400
    assert list(statuses.values()).count(404) == len(DISGUISES) - 7


async def test_other_paths_pass(bench: Bench) -> None:
    for path in ("/v1/models", "/health", "/metricsandmore", "/v1/metrics", "/v1/sleep", "/v1/models/a%20b"):
        reply = await bench.client.get(path)
        assert (reply.status, reply.served_by != "") == (200, True), path


async def test_the_configuration_says_what_is_blocked(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path, envoy={"blockedPaths": ["/v1/embeddings"]}) as bench:
        assert (await bench.client.get("/v1/embeddings")).status == 404
        assert (await bench.client.get("/sleep")).status == 200
    assert not (await nothing_is_blocked(tmp_path / "open"))


async def nothing_is_blocked(directory: Path) -> set[int]:
    directory.mkdir()
    async with running_bootstrap(directory, envoy={"blockedPaths": []}) as bench:
        return {(await bench.client.get(path)).status for path in ("/sleep", "/metrics")} - {200}
