"""The memory that a request takes while it is open and after its end, whatever its client sent. A request is
freed at its end, whether it waited, had no room to wait or went at once: its prompt must not stay in memory
until the garbage collector finds it.
"""

import gc
import json
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from epp.config.flow import WaitingSettings
from epp.config.policy import Sampling
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import PickerStatus
from epp.picker.gate import HeldRequest
from epp.protocol.header_names import TEST_SELECTION
from epp.protocol.http_events import Action, Headers, Piece
from epp.protocol.stream import HttpStream
from tests.unit.protocol.stream_bench import (
    BUFFERED,
    HEADERS,
    Bench,
    a_stream,
    head,
    request_body,
    request_headers,
    response_headers,
)
from tests.unit.protocol.waiting_bench import END, Held

_LONG = 400_000
_REQUESTS = 40
_KEPT_BYTES = 50_000
"""The bytes that stay for one request: its record, its booking, and its chain of about a hundred hashes."""


class CountingBench(Bench):
    """Counts like a real picker, and keeps its decisions."""

    def __init__(self) -> None:
        super().__init__(sampling=Sampling(share=1.0))
        self.metrics = Metrics(decisions=DecisionRing(maxlen=1000), state=_no_status)
        self.picker.subscribe(self.metrics.on_event)


def _no_status() -> PickerStatus:
    raise AssertionError("nobody looks at the metrics here")


def _request(number: int, **fields: object) -> tuple[Headers, Piece]:
    long = f"{number:06}" + "x" * _LONG
    extra = [(name, long) for name in ("x-session-id", "x-request-id", TEST_SELECTION)]
    path = (":path", f"/{long}/v1/completions")
    head = request_headers((*HEADERS[:1], path, *extra), end_of_stream=False, subset=None, modes=BUFFERED)
    body = {"model": "m", "prompt": "tell me about foxes", "stream": True} | {
        key: long if value == "long" else value for key, value in fields.items()
    }
    return head, request_body(json.dumps(body).encode(), end_of_stream=True)


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def _held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("state", ["ended", "open", "waits for its body"])
@pytest.mark.parametrize(
    "fields",
    [{"model": "long"}, {"cache_salt": "long"}, {"user": "long"}, {"prompt": "long"}],
    ids=["model", "salt", "unread", "prompt"],
)
def test_long_values_that_a_client_sends_are_not_kept_in_full(
    *, fields: dict[str, object], state: str
) -> None:
    bench, streams = CountingBench(), []
    before = _held_bytes()
    for number in range(_REQUESTS):
        stream = bench.stream()
        answer = response_headers(
            [(":status", "200"), ("content-type", "text/event-stream")], end_of_stream=False
        )
        for event in (*_request(number, **fields), answer)[: 1 if "waits" in state else None]:
            stream.receive(event, now=float(number))
        streams.append(stream)
        if state == "ended":
            streams.pop().close(now=number + 0.2)
    assert bench.in_flight() == (len(streams) if state == "open" else 0)
    assert _held_bytes() - before < _REQUESTS * _KEPT_BYTES


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    return sum(isinstance(one, HeldRequest | HttpStream) for one in gc.get_objects())


class Owner:
    """Owns a stream and gets its later answers, as a `Conversation` does."""

    def __init__(self, bench: Bench) -> None:
        self.stream = a_stream(bench.picker, bench.settings, deliver=self.later)

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
        stream.close(now=2.0, goes_on=True)
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
