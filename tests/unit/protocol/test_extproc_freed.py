"""A request is freed at its end, whether it waited, had no room to wait or went at once. Its prompt must not
stay in memory until Python's garbage collector finds it: clients choose how long prompts are.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest

from epp.config.flow import WaitingSettings
from epp.picker.gate import WaitingRequest
from epp.protocol.asking import StreamContext
from epp.protocol.http_events import Action
from epp.protocol.stream import HttpStream
from tests.unit.protocol.stream_bench import BUFFERED, Bench, head
from tests.unit.protocol.waiting_bench import END, Held


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    return sum(isinstance(one, WaitingRequest | HttpStream) for one in gc.get_objects())


class Owner:
    """Owns a stream and gets its later answers, as a `Conversation` does."""

    def __init__(self, bench: Bench) -> None:
        self.stream = HttpStream(
            StreamContext(
                bench.picker,
                settings=bench.settings,
                new_request_id=lambda: "made",
                timer=lambda: 0.0,
            ),
            deliver=self.later,
        )

    def later(self, actions: Sequence[Action]) -> None:
        raise AssertionError("nothing waits")


@pytest.mark.parametrize("end", ["closed", "detached"])
def test_a_stream_with_an_owner_is_freed_without_the_collector(end: str, bench: Bench) -> None:
    before = alive()
    owner = Owner(bench)
    stream = owner.stream
    stream.receive(head(BUFFERED), now=1.0)
    stream.receive(END, now=1.0)
    if end == "closed":
        stream.close(now=2.0)
    else:
        stream.detach(now=2.0)
    del owner, stream
    assert alive() == before


@pytest.mark.parametrize("end", ["goes", "leaves", "leaves after a forecast", "drained"])
def test_a_request_that_waited_is_freed_without_the_collector(end: str) -> None:
    held = Held(ttl_seconds=3600.0, longest_delay_s=3600.0)
    before = alive()
    stream, _ = held.waits(BUFFERED)
    if end == "leaves after a forecast":
        held.gate.pump(now=198.0)  # A server is nearly free, so the gate looks at the request.
        assert held.gate.waiting == 1
    if end == "goes":
        held.gate.pump(now=min(600.0, held.gate.due_at + 500.0))
    elif end == "drained":
        held.gate.drain(now=2.0)
    stream.close(now=1000.0)
    del stream
    assert alive() == before


def test_a_request_without_room_to_wait_is_freed_without_the_collector() -> None:
    held = Held(in_all=WaitingSettings(max_requests=1), ttl_seconds=3600.0, longest_delay_s=3600.0)
    first, _ = held.waits(BUFFERED)
    before = alive()
    for _ in range(3):
        stream = held.stream()
        stream.receive(head(BUFFERED), now=2.0)
        stream.receive(END, now=2.0)
        assert held.gate.waiting == 1
        stream.close(now=3.0)
        del stream
    held.bench.seen.refusals.clear()
    assert alive() == before
    first.close(now=4.0)
