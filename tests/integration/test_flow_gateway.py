"""The decisions of flow control as clients of the whole gateway see them. test_flow_envoy has the cases that
depend on the transport.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.harness.held_requests import begin, busy, free, wait_for

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = pytest.mark.envoy


async def test_where_envoy_cannot_be_asked_to_wait_no_request_is_held(tmp_path: Path) -> None:
    async with busy(tmp_path, envoy={"maxMessageTimeoutSeconds": 0}) as gateway:
        assert (await gateway.client.complete("second " * 40)).status == 200
        assert await gateway.envoy.bypassed() == 0


async def test_many_clients_that_leave_take_no_place_from_those_that_wait(tmp_path: Path) -> None:
    async with busy(tmp_path, {"inAll": {"maxRequests": 20}}) as gateway:
        tasks = await begin(gateway, "first-stays", "second-stays")
        for _ in range(10):
            # A request that is routed unread does not wait. Of more than 15 at once, some may be unread.
            await gateway.picker.reads_bodies()
            leaving = [asyncio.create_task(gateway.client.complete(f"{n} " * 40)) for n in range(15)]
            await wait_for(gateway, 17)
            for task in leaving:
                task.cancel()
            await wait_for(gateway, 2)
        assert await gateway.picker.metric("epp_in_flight") == 1
        assert await gateway.picker.metric("epp_refused_total") == 0
        free(gateway)
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200, 200]
        assert len(gateway.backends[0].prompts) == 3, "requests whose clients left reached no server"
        assert await gateway.envoy.bypassed() == 0


async def test_bodies_of_many_megabytes_wait_within_their_bound(tmp_path: Path) -> None:
    async with busy(tmp_path, {"inAll": {"maxBytes": 10 * 2**20}}) as gateway:
        text = " long" * 2**19
        tasks = []
        for n in range(3):
            tasks.append(asyncio.create_task(gateway.client.complete(f"{n}{text}")))
            await wait_for(gateway, n + 1)
        refused = await gateway.client.complete("a fourth" + text)
        assert (refused.status, refused.json()["error"]["code"]) == (429, "flow_full")
        free(gateway)
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 3
