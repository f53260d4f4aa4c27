"""Which paths clients can reach through the real Envoy on our bootstrap. They never reach the pages that
model servers keep for operators.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from epp.base.types import Address
from epp.config.settings import BLOCKED_PATHS
from tests.contract.spellings import combined, single
from tests.contract.vllm_routes import SAMPLES, reaches_operators
from tests.harness.envoy import connection_manager
from tests.harness.gateway import EnvoyBench, running_gateway

pytestmark = pytest.mark.envoy


async def status_of_path(address: Address, path: str) -> int | None:
    """Send the path byte for byte, which no HTTP client does. Return the status, or None when the answer
    could not be read.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n".encode())
        words = (await reader.readline()).split(maxsplit=2)
        return int(words[1]) if words else None
    finally:
        writer.close()


async def ask_all(address: Address, targets: list[str]) -> None:
    for start in range(0, len(targets), 20):
        await asyncio.gather(*(status_of_path(address, target) for target in targets[start : start + 20]))


async def test_paths_for_operators_are_404_in_json_and_reach_no_server(bench: EnvoyBench) -> None:
    bench.picker.always(bench.backends[0].address)
    for path in BLOCKED_PATHS:
        for method in ("GET", "POST"):
            reply = await bench.client.request(method, path)
            assert reply.status == 404
            assert reply.headers["content-type"] == "application/json"
            assert reply.json()["error"] == {
                "code": "path_not_served",
                "message": "not served by this gateway",
                "param": None,
                "type": "not_found_error",
            }
    assert all(not backend.received for backend in bench.backends)
    assert bench.picker.exchanges == []
    assert await bench.envoy.bypassed() == 0


async def test_no_spelling_of_a_blocked_path_gets_to_a_server_that_would_know_it(bench: EnvoyBench) -> None:
    """The picker here refuses nothing. Spellings that vLLM does not know may pass."""
    bench.picker.always(bench.backends[0].address)
    gateway = Address.parse(bench.config.envoy.listen)
    targets = [t for path in SAMPLES for t in (*single(path), *combined(path, count=5, seed=2))]
    await ask_all(gateway, targets)
    reached = [received.target for received in bench.backends[0].received]
    assert [target for target in reached if reaches_operators(target)] == []
    assert len(reached) > 50, "other names, such as `metrics#fragment`, are not blocked"


async def test_the_picker_refuses_blocked_paths_if_the_gateway_lets_them_pass(
    tmp_path: Path,
) -> None:
    def without_routes(document: dict[str, Any]) -> None:
        (host,) = connection_manager(document)["route_config"]["virtual_hosts"]
        del host["routes"][:-1]
        for setting in ("normalize_path", "merge_slashes", "path_with_escaped_slashes_action"):
            del connection_manager(document)[setting]

    async with running_gateway(tmp_path, edit=without_routes, backends=1) as site:
        gateway = Address.parse(site.config.envoy.listen)
        targets = [t for path in SAMPLES for t in (path, *combined(path, count=5, seed=3))]
        await ask_all(gateway, targets)
        reached = [r.target for r in site.backends[0].prompts]
        assert [target for target in reached if reaches_operators(target)] == []
        reply = await site.client.request("POST", "/sleep")
        assert (reply.status, reply.json()["error"]["code"]) == (404, "path_not_served")
        assert (await site.client.get("/v1/models")).status == 200
        assert await site.picker.metric("epp_refused_total", reason="path_not_served") > len(SAMPLES)
