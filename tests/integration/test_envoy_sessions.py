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


async def _served(url: str, client_address: str) -> str:
    connector = aiohttp.TCPConnector(local_addr=(client_address, 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"{url}/v1/completions", json=_REQUEST) as response,
    ):
        assert response.status == 200
        return response.headers[SERVED_BY]


async def test_each_client_address_keeps_its_server(tmp_path: Path) -> None:
    """Envoy appends the peer's address to `x-forwarded-for`, so the header may name the session."""
    policy = {"rule": "session", "sessionHeader": "x-forwarded-for"}
    async with running_gateway(tmp_path, policy=policy) as gateway:
        clients = [f"127.0.0.{n}" for n in range(2, 10)]
        rounds = []
        for _ in range(5):
            await gateway.picker.reads_bodies()
            rounds.append(await asyncio.gather(*(_served(gateway.envoy.url, client) for client in clients)))
    assert rounds == [rounds[0]] * 5
    assert len(set(rounds[0])) > 1
