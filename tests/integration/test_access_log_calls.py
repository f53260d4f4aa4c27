"""Access log calls on both transports. Each call gets one answer, at its end. The number of open calls is
bounded, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from epp.protocol.access_log import METHOD, MOST_CALLS, SERVICE
from tests.harness.processes import wait_until
from tests.integration.test_extproc_server import ServerRig, serving_picker
from tests.unit.protocol.test_extproc_access_log import entry, log_message

E1 = "10.0.0.1"
"""The address of the first endpoint of `serving`."""


def call(channel: grpc.aio.Channel, *, method: str = METHOD) -> Any:
    return channel.stream_unary(f"/{SERVICE}/{method}")()


def share(rig: ServerRig) -> float:
    state = next(s for s in rig.picker.fleet.states() if s.endpoint.name == "e1")
    return rig.picker.fleet.failures.share(state, now=0.0)


async def test_each_cut_counts_and_the_call_is_answered_at_its_end() -> None:
    async with serving_picker() as rig, grpc.aio.insecure_channel(rig.target) as channel:
        asked = call(channel)
        for _ in range(3):
            await asked.write(log_message(entry(host=E1, port=80)))
        await asked.write(b"\xff no protobuf")
        await asked.write(log_message(entry(host=E1, port=80)))
        await asked.done_writing()
        assert await asked == b""
        assert await asked.code() is grpc.StatusCode.OK
        assert share(rig) == pytest.approx(0.59, abs=0.01), "each of the four cuts counts as a failure"
        assert rig.seen.faults == ["access_log_unreadable"]


async def test_calls_over_the_bound_are_refused_and_ended_calls_leave_room() -> None:
    async with serving_picker() as rig, grpc.aio.insecure_channel(rig.target) as channel:
        first = [call(channel) for _ in range(MOST_CALLS)]
        await asyncio.gather(*(asked.write(log_message(entry(host=E1, port=80))) for asked in first))
        await wait_until(lambda: share(rig) > 0.99, what="all calls are open")
        one_more = call(channel)
        await one_more.write(log_message())
        assert await one_more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for asked in first:
            asked.cancel()

        async def room() -> bool:
            asked = call(channel)
            await asked.done_writing()
            return await asked.code() is grpc.StatusCode.OK

        await wait_until(room, what="cancelled calls leave room")


async def test_other_methods_of_the_service_are_not_implemented() -> None:
    async with serving_picker() as rig, grpc.aio.insecure_channel(rig.target) as channel:
        assert await call(channel, method="Other").code() is grpc.StatusCode.UNIMPLEMENTED
