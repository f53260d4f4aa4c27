"""Calls of one server, for tests: the side of a transport, a picker whose servers take long for each prompt,
and the messages of a request as bytes.
"""

from collections.abc import Sequence
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.config.flow import Flow
from epp.config.policy import Cost
from epp.picker.gate import Gate
from epp.protocol.conversation import Conversation, LiveStreams
from epp.protocol.settings import StreamSettings
from epp.transport.http2.messages import OK as GRPC_OK
from epp.transport.http2.messages import Reply
from tests.unit.protocol.stream_bench import BODY, HEADERS, OK, Bench


class NotingCaller:
    """A `Caller` that notes the answers and the end of the call."""

    is_open = True
    trace = ""

    def __init__(self, *, waited_s: float = 0.0) -> None:
        self._waited_s = waited_s
        self.sent: list[bytes] = []
        self.ended: list[tuple[int, str]] = []

    def waited_s(self) -> float:
        return self._waited_s

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def reply(self, reply: Reply) -> None: ...

    def end(self, status: int = GRPC_OK, details: str = "") -> None:
        self.ended.append((status, details))


class Calls:
    """Calls of a picker whose servers take long for each prompt."""

    def __init__(self, **flow: Any) -> None:
        bench = Bench(flow=Flow(**flow), cost=Cost(prefill_tokens_per_second=1.0))
        bench.set_endpoints(bench.picker.news.endpoints()[0].address)
        self.picker = bench.picker
        self.gate = Gate(self.picker)
        settings = StreamSettings(longest_delay_s=30.0)
        self.streams = LiveStreams(self.picker, settings=settings, clock=lambda: 1.0, gate=self.gate)
        self.pumps = 0
        self.streams.on_room = self._pump_soon

    def _pump_soon(self) -> None:
        self.pumps += 1

    def ask(self, *messages: bytes) -> tuple[Conversation, NotingCaller]:
        caller = NotingCaller()
        call = Conversation(self.streams, caller)
        for data in messages or (head(), body()):
            call.message(data, now=1.0)
        return call, caller


def head() -> bytes:
    message = ext_proc.ProcessingRequest(protocol_config={"request_body_mode": 2})
    fill(message.request_headers, HEADERS)
    return bytes(message.SerializeToString())


def body() -> bytes:
    message = ext_proc.ProcessingRequest(request_body={"body": BODY, "end_of_stream": True})
    return bytes(message.SerializeToString())


def answer() -> bytes:
    message = ext_proc.ProcessingRequest()
    fill(message.response_headers, OK)
    return bytes(message.SerializeToString())


def fill(part: ext_proc.HttpHeaders, headers: Sequence[tuple[str, str]]) -> None:
    for name, value in headers:
        part.headers.headers.add(key=name, raw_value=value.encode())
