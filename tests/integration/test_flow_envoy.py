"""Requests that flow control holds, through the real Envoy, on both transports. They wait longer than Envoy
would wait for a picker, and no request is lost.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.harness.client import Reply
from tests.harness.envoy import EXT_PROC
from tests.harness.gateway import Gateway
from tests.harness.held_requests import begin, busy, free, wait_for, waiting
from tests.harness.processes import wait_until

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = pytest.mark.envoy

PATIENCE_S = 1.0
"""How long Envoy waits for the picker, unless the picker says that a request is held."""


async def test_request_waits_longer_than_envoys_patience_and_is_served_by_pick(tmp_path: Path) -> None:
    async with busy(tmp_path, envoy={"messageTimeoutSeconds": PATIENCE_S}) as gateway:
        [task] = await begin(gateway, "second", **{"x-request-id": "held"})
        await asyncio.sleep(2 * PATIENCE_S)  # The test is that nothing happens in this time.
        assert not task.done()
        free(gateway)
        reply = await task
        assert reply.status == 200
        decision = await gateway.picker.decision("held")
        assert decision is not None
        assert decision["waited_s"] > PATIENCE_S
        assert await gateway.envoy.bypassed() == 0
        assert await gateway.envoy.stat(f"{EXT_PROC}message_timeouts") == 0
        assert await waiting(gateway) == 0


async def test_a_request_is_refused_before_envoy_stops_waiting_for_it(tmp_path: Path) -> None:
    async with busy(
        tmp_path, envoy={"messageTimeoutSeconds": PATIENCE_S, "maxMessageTimeoutSeconds": 2 * PATIENCE_S}
    ) as gateway:
        reply = await gateway.client.complete("second " * 40)
        assert (reply.status, reply.json()["error"]["code"]) == (429, "flow_ttl")
        assert await gateway.envoy.bypassed() == 0


async def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async with busy(tmp_path, {"inAll": {"maxRequests": 1}}) as gateway:
        [task] = await begin(gateway, "second")
        full = await gateway.client.complete("third " * 40)
        assert (full.status, full.json()["error"]["code"]) == (429, "flow_full")
        task.cancel()
        await wait_for(gateway, 0)
        assert await gateway.picker.metric("epp_in_flight") == 1
        [task] = await begin(gateway, "fourth")
        free(gateway)
        assert (await task).status == 200


async def test_a_picker_that_drains_sends_all_waiting_requests(tmp_path: Path) -> None:
    async with busy(tmp_path) as gateway:
        tasks = await begin(gateway, *(f"prompt-{n}" for n in range(5)))
        gateway.picker.process.signal(signal.SIGTERM)
        replies = await asyncio.gather(*tasks)
        assert [reply.status for reply in replies] == [200] * 5
        assert len(gateway.backends[0].prompts) == 6
        assert await gateway.picker.process.wait() == 0
        assert await gateway.envoy.bypassed() == 0


async def many_wait(gateway: Gateway, count: int = 200) -> list[asyncio.Task[Reply]]:
    """Return so many requests that wait. Requests for which the picker was late were never held: they have
    their answers.
    """
    tasks: list[asyncio.Task[Reply]] = []

    async def all_wait() -> bool:
        return await waiting(gateway) == sum(not task.done() for task in tasks)

    while len(tasks) < count:  # few at once, so that few are late
        few = range(min(20, count - len(tasks)))
        tasks += [asyncio.create_task(gateway.client.complete(f"{len(tasks)} {n} " * 40)) for n in few]
        await wait_until(all_wait, what="each request waits or has its answer")
        tasks = [task for task in tasks if not task.done()]
    return tasks


async def test_a_picker_without_time_to_drain_still_picks_for_all_that_wait(tmp_path: Path) -> None:
    async with busy(tmp_path, drainSeconds=0) as gateway:
        tasks = await many_wait(gateway, 600)
        answered, bypassed = len(gateway.backends[0].prompts) - 1, await gateway.envoy.bypassed()
        gateway.picker.process.signal(signal.SIGTERM)
        replies = await asyncio.gather(*tasks)
        assert [reply.status for reply in replies] == [200] * 600
        log = gateway.envoy.access_log
        await wait_until(lambda: len(log()) == answered + 600, what="all requests are in the log")
        assert {entry["picked"] for entry in log()[answered:]} == {str(gateway.backends[0].address)}
        # The request that is being answered may add one.
        assert await gateway.envoy.bypassed() <= bypassed + 1


async def test_a_killed_picker_loses_the_queue_and_no_request(tmp_path: Path) -> None:
    async with busy(tmp_path) as gateway:
        tasks = await many_wait(gateway)
        answered, bypassed = len(gateway.backends[0].prompts), await gateway.envoy.bypassed()
        gateway.picker.process.kill()
        replies = await asyncio.gather(*tasks)
        assert [reply.status for reply in replies] == [200] * 200
        # The request that is being answered may add one.
        assert await gateway.envoy.bypassed() >= bypassed + 200
        assert len(gateway.backends[0].prompts) == answered + 200


async def test_where_requests_may_not_pass_a_killed_picker_all_that_wait_get_503(tmp_path: Path) -> None:
    async with busy(tmp_path, holdStreams=False, envoy={"failOpen": False}) as gateway:
        tasks = await many_wait(gateway)
        answered = len(gateway.backends[0].prompts)
        gateway.picker.process.kill()
        replies = await asyncio.gather(*tasks)
        assert [reply.status for reply in replies] == [503] * 200
        assert await gateway.envoy.bypassed() == 0
        assert len(gateway.backends[0].prompts) == answered
