"""The decisions of flow control as clients of the whole gateway see them. test_flow_envoy has the cases that
depend on the transport.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.harness.gateway import write_policy
from tests.integration.test_flow_envoy import begin, busy, free

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = pytest.mark.envoy

OBJECTIVE = "x-llm-d-inference-objective"


async def test_where_envoy_cannot_be_asked_to_wait_no_request_is_held(tmp_path: Path) -> None:
    async with busy(tmp_path, envoy={"maxMessageTimeoutSeconds": 0}) as gateway:
        assert (await gateway.client.complete("second " * 40)).status == 200
        assert await gateway.envoy.bypassed() == 0


async def test_a_request_that_cannot_be_in_time_is_refused_at_once(tmp_path: Path) -> None:
    async with busy(tmp_path) as gateway:
        reply = await gateway.client.complete("second " * 40, headers={"x-llm-d-slo-ttft-ms": "2000"})
        assert reply.status == 429
        assert reply.json()["error"]["type"] == "rate_limit_exceeded"
        assert reply.headers["x-llm-d-request-dropped-reason"] == "flow_deadline"
        assert int(reply.headers["retry-after"]) >= 1
        assert len(gateway.backends[0].prompts) == 1


async def test_the_higher_priority_goes_first(tmp_path: Path) -> None:
    async with busy(tmp_path) as gateway:
        tasks = await begin(gateway, "batch-1", "batch-2")
        tasks += await begin(gateway, "someone", **{OBJECTIVE: "person"})
        free(gateway)
        assert {reply.status for reply in await asyncio.gather(*tasks)} == {200}
        order = [received.body.split(b'"prompt":')[1][:12] for received in gateway.backends[0].prompts[1:]]
        assert [b"someone" in order[0], b"batch-1" in order[1], b"batch-2" in order[2]] == [True] * 3, order


async def test_a_policy_that_turns_flow_control_off_lets_all_go(tmp_path: Path) -> None:
    async with busy(tmp_path) as gateway:
        tasks = await begin(gateway, "second", "third")
        write_policy(gateway.config, {"cost": {"prefillTokensPerSecond": 1}})
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200, 200]
