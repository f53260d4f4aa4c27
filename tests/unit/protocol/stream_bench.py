"""A picker with three endpoints and streams on it, and the messages that the tests of a stream send and
look for.
"""

import json
import random
from collections.abc import Callable, Sequence
from functools import partial

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import PolicySpec, Sampling
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.protocol.http_events import (
    Action,
    Answer,
    BodyMode,
    Headers,
    HttpEvent,
    Modes,
    Piece,
    Refuse,
    Slot,
    Trailers,
)
from epp.protocol.settings import StreamContext, StreamSettings
from epp.protocol.stream import HttpStream
from epp.request.rewriting import Rewrite, Rewrites, RewriteTarget
from tests.harness.seen import Seen
from tests.invariants.protocol import check_stream
from tests.unit.picker.picker_questions import policy_of

request_headers = partial(Headers, Slot.REQUEST_HEADERS)
request_body = partial(Piece, Slot.REQUEST_BODY)
request_trailers = partial(Trailers, Slot.REQUEST_TRAILERS)
response_headers = partial(Headers, Slot.RESPONSE_HEADERS)
response_body = partial(Piece, Slot.RESPONSE_BODY)
response_trailers = partial(Trailers, Slot.RESPONSE_TRAILERS)

BODY = json.dumps({"model": "m", "prompt": "tell me about foxes " * 40}).encode()
HEADERS = (
    (":method", "POST"),
    (":path", "/v1/completions"),
    ("content-length", str(len(BODY))),
    ("x-request-id", "r1"),
)
OK = ((":status", "200"), ("content-type", "text/event-stream"))
KEY = "x-gateway-destination-endpoint"
A, B, C = Address("10.0.0.1", 8000), Address("10.0.0.2", 8000), Address("fd00::1", 8000)

BUFFERED = Modes(BodyMode.BUFFERED)
PARTIAL = Modes(BodyMode.BUFFERED_PARTIAL)
STREAMED = Modes(BodyMode.STREAMED, BodyMode.STREAMED)
DUPLEX = Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
GRPC = Modes(BodyMode.GRPC, BodyMode.GRPC)
NONE = Modes()
ALL = [BUFFERED, PARTIAL, STREAMED, DUPLEX, GRPC, NONE]


def a_stream(
    picker: Picker,
    settings: StreamSettings,
    *,
    gate: Gate | None = None,
    deliver: Callable[[Sequence[Action]], None] | None = None,
) -> HttpStream:
    context = StreamContext(
        picker, settings=settings, new_request_id=lambda: "made", timer=lambda: 0.0, gate=gate
    )
    return HttpStream(context, deliver=deliver)


class Bench:
    """A picker with three endpoints, and streams on it."""

    def __init__(self, *, settings: StreamSettings | None = None, **spec: object) -> None:
        self.settings = settings or StreamSettings()
        policy = PolicySpec(**{"sampling": Sampling(share=0), **spec})  # type: ignore[arg-type]  # any field of it
        self.picker = Picker(policy_of(policy), rng=random.Random(3))
        self.set_endpoints(A, B, C)
        self.seen = Seen.of(self.picker)

    def set_endpoints(self, *addresses: Address) -> None:
        self.picker.news.set_endpoints(
            [Endpoint(name=EndpointName(f"e{i}"), address=a) for i, a in enumerate(addresses)], now=0.0
        )

    def stream(self) -> HttpStream:
        return a_stream(self.picker, self.settings)

    def in_flight(self) -> int:
        return sum(s.in_flight for s in self.picker.fleet.states())


def run(stream: HttpStream, *events: HttpEvent) -> list[Action]:
    actions: list[Action] = []
    for i, event in enumerate(events):
        actions += stream.receive(event, now=1.0 + i)
        check_stream(stream)
    return actions


def head(modes: Modes | None, *extra: tuple[str, str], end: bool = False) -> Headers:
    return request_headers((*HEADERS, *extra), end_of_stream=end, modes=modes)


def whole(modes: Modes | None, *extra: tuple[str, str]) -> list[HttpEvent]:
    """Return a request as a data plane sends it in this mode."""
    return [head(modes, *extra), *([] if modes is NONE else [request_body(BODY, end_of_stream=True)])]


def routed(actions: Sequence[Action]) -> list[Answer]:
    return [a for a in actions if isinstance(a, Answer) and a.destination]


def only(actions: Sequence[Action]) -> Answer:
    """Return the answer that is all that the data plane gets."""
    (answer,) = actions
    assert isinstance(answer, Answer)
    return answer


def slots(actions: Sequence[Action]) -> list[Slot]:
    return [a.slot for a in actions if isinstance(a, Answer | Piece)]


def echoed(actions: Sequence[Action]) -> bytes:
    return b"".join(bytes(a.data) for a in actions if isinstance(a, Piece))


def refused(actions: Sequence[Action]) -> Refuse:
    assert len(actions) == 1
    assert isinstance(actions[0], Refuse)
    return actions[0]


def through(bench: Bench, modes: Modes = BUFFERED, *extra: tuple[str, str]) -> HttpStream:
    """Return a stream whose request has been routed."""
    stream = bench.stream()
    run(stream, *whole(modes, *extra))
    assert bench.in_flight() > 0
    return stream


def rewriting(bench: Bench, *names: str) -> None:
    """Let requests for these models go to `the-target`. Without names: all requests."""
    bench.picker.news.set_rewrites(Rewrites([Rewrite((RewriteTarget("the-target"),), names)]))
