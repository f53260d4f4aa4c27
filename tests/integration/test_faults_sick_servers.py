"""A model server that answers 500 at once, or hangs, while its metrics are fine:
it must not draw the traffic of the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from tests.harness.client import Reply
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = pytest.mark.envoy

POLICY = {"scrape": {"intervalSeconds": 0.2, "timeoutSeconds": 1}, "failures": {"trialSeconds": 0.5}}
NUMBERS = count()


async def ask(gateway: Gateway) -> Reply:
    return await gateway.client.complete(f"prompt {next(NUMBERS)} " + "x" * 400)


async def left_out(gateway: Gateway, name: str) -> bool:
    return await gateway.picker.metric("epp_endpoint_left_out", endpoint=name) == 1


@pytest.mark.parametrize("rule", ["least-cost", "round-robin"])
async def test_a_server_that_answers_500_at_once_gets_few_requests_and_comes_back(
    tmp_path: Path, rule: str
) -> None:
    async with running_gateway(tmp_path, backends=4, policy={**POLICY, "rule": rule}) as gateway:
        sick = gateway.backends[0]
        sick.behaviour.status = 500
        before = Counter([(await ask(gateway)).status for _ in range(100)])
        assert before[500] <= 12, "at most its share, and ten before that is known"
        assert before[500] > 0, "nothing was meant for it: the test shows nothing"
        assert await gateway.picker.metric("epp_endpoint_failure_share", endpoint="s0") > 0
        answers = await gateway.picker.metric("epp_answers_total", endpoint="s0", **{"class": "5xx"})
        assert answers == before[500]
        if rule == "round-robin":  # least-cost pays the price of one failure by asking others
            assert await left_out(gateway, "s0")
        after = Counter([(await ask(gateway)).status for _ in range(100)])
        assert after[500] <= 5, "trials only"
        sick.behaviour.status = 200

        async def serves_again() -> bool:
            replies = await asyncio.gather(*(ask(gateway) for _ in range(16)))
            return "s0" in {reply.served_by for reply in replies if reply.status == 200}

        await wait_until(serves_again, what="it serves again")
        assert await gateway.picker.metric("epp_answers_total", endpoint="s0", **{"class": "2xx"}) > 0


async def test_a_server_that_hangs_is_left_out_and_comes_back(tmp_path: Path) -> None:
    policy = {**POLICY, "failures": {"trialSeconds": 0.5, "hangSeconds": 0.3}}
    async with running_gateway(tmp_path, backends=4, policy=policy) as gateway:
        gate = gateway.backends[0].behaviour.before_headers
        gate.shut()
        pending: set[asyncio.Task[Reply]] = set()

        async def noticed() -> bool:
            pending.update(asyncio.create_task(ask(gateway)) for _ in range(4))
            return await left_out(gateway, "s0")

        await wait_until(noticed, what="it is left out")
        await wait_until(
            lambda: (
                "s0 gets only trial requests: its requests hang" in gateway.picker.process.stderr.read_text()
            ),
            what="the log names it",
        )
        held = gate.waiting
        replies = [asyncio.create_task(ask(gateway)) for _ in range(60)]
        await wait_until(lambda: sum(r.done() for r in replies) >= 55, what="the others serve nearly all")
        assert gate.waiting - held <= 5, "trials only"
        gate.open()
        assert {r.status for r in await asyncio.gather(*pending, *replies)} == {200}

        async def back() -> bool:
            await asyncio.gather(*(ask(gateway) for _ in range(4)))
            return not await left_out(gateway, "s0")

        await wait_until(back, what="it is back")
