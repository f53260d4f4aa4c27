"""Rules that keep equal requests together without a table, through the real Envoy and the real picker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.harness.client import SERVED_BY
from tests.harness.gateway import running_gateway

pytestmark = pytest.mark.envoy

_REQUEST = {"model": "base", "prompt": "the same of all clients " * 40, "max_tokens": 1}


async def _served(url: str, client_address: str, *, times: int) -> set[str]:
    connector = aiohttp.TCPConnector(local_addr=(client_address, 0))
    async with aiohttp.ClientSession(connector=connector) as session:
        found = set()
        for _ in range(times):
            async with session.post(f"{url}/v1/completions", json=_REQUEST) as response:
                assert response.status == 200
                found.add(response.headers[SERVED_BY])
        return found


async def test_each_client_address_keeps_its_server(tmp_path: Path) -> None:
    """Envoy appends the peer's address to `x-forwarded-for`, so the header may name the session."""
    policy = {"rule": "session", "sessionHeader": "x-forwarded-for"}
    async with running_gateway(tmp_path, policy=policy) as gateway:
        clients = [f"127.0.0.{n}" for n in range(2, 10)]
        served = await asyncio.gather(*(_served(gateway.envoy.url, client, times=5) for client in clients))
    assert [len(servers) for servers in served] == [1] * len(clients)
    assert len(set.union(*served)) > 1


async def test_prompts_with_equal_beginnings_go_to_one_server_from_either_worker(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, workers=2, policy={"rule": "prefix-hash"}) as gateway:
        beginnings = [f"beginning {n} " * 100 for n in range(8)]
        served = [
            {(await gateway.client.complete(f"{beginning}{question}")).served_by for question in range(5)}
            for beginning in beginnings
        ]
    assert [len(servers) for servers in served] == [1] * len(beginnings)
    assert len(set.union(*served)) > 1
