"""A model server begins its answers well and cuts them midway, while its health and its metrics are fine.
Only Envoy sees the cut, and its access log reports the cut to the picker.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.harness.backend import Behaviour
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until
from tests.integration.test_faults_sick_servers import POLICY, complete_anew, left_out

pytestmark = pytest.mark.envoy


async def comes_whole(gateway: Gateway) -> bool:
    """Return whether the answer to one request comes whole."""
    try:
        return (await complete_anew(gateway)).status == 200
    except aiohttp.ClientPayloadError:
        return False


async def recovered(gateway: Gateway) -> bool:
    await asyncio.gather(*(complete_anew(gateway) for _ in range(16)))
    return not await left_out(gateway, "s0")


async def cut_answers(gateway: Gateway, name: str) -> float:
    return await gateway.picker.metric("epp_cut_answers_total", endpoint=name)


async def has_cut(gateway: Gateway, name: str, *, times: float) -> bool:
    return await cut_answers(gateway, name) == times


@pytest.mark.core
async def test_a_server_that_cuts_its_answers_gets_only_trials_and_comes_back(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=4, policy=POLICY) as gateway:
        sick = gateway.backends[0]
        sick.behaviour.cuts = "length"
        seen = 0
        while not await left_out(gateway, "s0"):
            seen += [await comes_whole(gateway) for _ in range(4)].count(False)
        after = [await comes_whole(gateway) for _ in range(60)]
        assert after.count(False) <= 1, "the server gets only trials"
        seen += after.count(False)
        said = "s0 gets only trial requests: its answers break off midway"
        await wait_until(
            lambda: said in gateway.picker.process.stderr.read_text(), what="the log names the server"
        )
        sick.behaviour = Behaviour()
        await wait_until(partial(recovered, gateway), what="s0 gets requests again")
        await wait_until(partial(has_cut, gateway, "s0", times=seen), what="each cut counts once")
        assert await gateway.picker.metric("epp_protocol_errors_total") == 0


async def test_clients_that_leave_and_answers_that_never_began_are_no_cuts(tmp_path: Path) -> None:
    policy = {**POLICY, "rule": "round-robin"}
    async with running_gateway(tmp_path, backends=3, policy=policy) as gateway:
        left, reset, cuts = gateway.backends
        left.behaviour.before_last.shut()
        left.behaviour.chunks = 2
        opened = 0
        while opened < 8:
            async with gateway.client.stream() as answer:
                if answer.served_by == "s0":
                    await answer.piece()
                    answer.abort()
                    opened += 1
        left.behaviour = Behaviour()
        reset.behaviour.reset = True
        for _ in range(6):
            assert (await complete_anew(gateway)).status == 200, "Envoy repeats the request at another server"
        reset.behaviour = Behaviour()
        cuts.behaviour.cuts = "chunked"
        while await comes_whole(gateway):
            pass
        await wait_until(
            lambda: has_cut(gateway, "s2", times=1), what="the picker hears of the one cut answer"
        )
        assert await cut_answers(gateway, "s0") == await cut_answers(gateway, "s1") == 0
        assert await gateway.picker.metric("epp_endpoint_failure_share", endpoint="s0") == 0
