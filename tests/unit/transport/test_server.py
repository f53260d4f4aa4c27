"""How long the drain and the stop of the ext_proc server last, in simulated time."""

import itertools
import random
from collections.abc import Callable
from typing import cast

import pytest

from epp.config.policy import DEFAULT_POLICY
from epp.config.sections import Listen
from epp.picker.picker import Picker
from epp.protocol.conversation import Conversation
from epp.protocol.settings import StreamSettings
from epp.transport.http2.messages import OK
from epp.transport.http2_server import Http2Server
from epp.transport.server import ExtProcServer
from tests.unit.protocol.calls_bench import Calls, NotingCaller, answer, body, head


def server_at(clock: Callable[[], float]) -> ExtProcServer:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1), unix_offset_s=0.0)
    return ExtProcServer(picker, listen=Listen(), settings=StreamSettings(), clock=clock)


@pytest.mark.parametrize(("began", "least_s", "most_s"), [(None, 0, 1), (100.0, 3, 4), (98.5, 0, 1)])
async def test_a_drain_waits_only_if_a_request_came_in_the_last_second(
    began: float | None, least_s: float, most_s: float
) -> None:
    times = itertools.count(100.0, 0.5)
    server = server_at(lambda: next(times))
    if began is not None:
        call = Conversation(server.streams, NotingCaller())
        call.message(head(), now=began)
        call.gone(now=began, broken=False)
    await server.drain(30.0)
    assert least_s <= next(times) - 100.5 <= most_s


@pytest.mark.parametrize(
    ("drain_s", "waits_until", "least_s", "most_s"),
    [(0.0, 104.0, 3, 5), (0.0, 200.0, 10, 11), (2.0, 101.0, 2, 3), (20.0, 200.0, 20, 21)],
)
async def test_only_requests_that_waited_prolong_a_drain_by_10_s_at_most(
    drain_s: float, waits_until: float, least_s: float, most_s: float
) -> None:
    times = itertools.count(100.0, 0.5)
    calls = Calls(mode="Hold")
    calls.ask()
    waits, _ = calls.ask()

    def clock() -> float:
        now = next(times)
        if now >= waits_until:
            waits.gone(now=now, broken=False)
        return now

    server = server_at(clock)
    server.streams = calls.streams  # a picker in which a request waits
    await server.drain(drain_s)
    assert least_s <= next(times) - 100.5 <= most_s


async def test_a_call_that_says_nothing_keeps_no_drain() -> None:
    times = itertools.count(100.0, 0.5)
    server, caller = server_at(lambda: next(times)), NotingCaller()
    server.streams = Calls().streams  # a picker that has a server
    call = Conversation(server.streams, caller)
    assert not server.streams.live
    await server.drain(30.0)
    assert next(times) - 100.5 <= 1
    for data in (head(), body(), answer()):
        call.message(data, now=101.0)
    assert caller.ended == [(OK, "")], "a call that begins in a drain ends like the others"
    assert not server.streams.live


@pytest.mark.parametrize(("live", "grace_s"), [(False, 0.0), (True, 1.0)])
async def test_a_stop_waits_only_for_calls_in_flight(*, live: bool, grace_s: float) -> None:
    server, asked = server_at(lambda: 100.0), []

    class Noting:
        async def stop(self, grace_s: float) -> None:
            asked.append(grace_s)

    server.transport = cast("Http2Server", Noting())
    call = Conversation(server.streams, NotingCaller())
    call.message(head(), now=100.0)
    if not live:
        call.gone(now=100.0, broken=False)
    await server.stop(1.0)
    assert asked == [grace_s]
