"""Input from the data plane over ext_proc."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from epp.config.policy import PolicySpec
from epp.config.sections import Listen
from epp.picker.events import OVER, Began, Ended, PickerEvent
from epp.protocol.access_log import AccessLog
from epp.protocol.asking import request_names
from epp.protocol.codec import decode, encode
from epp.protocol.http_events import StreamProtocolError
from epp.protocol.settings import StreamSettings
from epp.protocol.stream import HttpStream
from epp.transport.http2.frames import Setting, frame, settings
from epp.transport.peer import Call, Peer
from epp.transport.server import ExtProcServer
from tests.fuzz.behind import OfBytes, one_pick, small_picker
from tests.fuzz.trees import as_protobuf
from tests.harness.http2_frames import (
    CallerSide,
    block,
    continuation,
    data,
    grpc,
    headers,
    hello,
    ping,
    reset,
    window_update,
)
from tests.harness.pipe import Pipe
from tests.invariants.fleet import check_failures
from tests.invariants.protocol import check_stream
from tests.invariants.transport import check_connection, check_peer
from tests.unit.protocol.calls_bench import NotingCaller
from tests.unit.protocol.stream_bench import a_stream

HINT = b"x-gateway-destination-endpoint-subset"
ADDRESSES = [[1, [[3, b"10.0.0.1:8000"]]]]


class ExtProcMessages:
    """Messages of the data plane. They are decoded and go into the state machine of a request."""

    documents: Sequence[object] = [
        [
            [part, [[1, [[1, [[1, name], [3, b"/v1/x"]]], [1, [[1, b"X-Request-Id"], [2, b"r"]]]]], [3, 1]]],
            [8, [[1, [[1, b"envoy.lb.subset_hint"], [2, [[1, [[1, HINT], [2, [[6, ADDRESSES]]]]]]]]]]],
            [9, [[1, b"a filter"], [2, [[1, [[1, b"upstream.address"], [2, [[3, b"10.0.0.1:8000"]]]]]]]]],
            [11, [[1, 2]]],
        ]
        for part, name in ((2, b":path"), (3, b":status"))
    ] + [
        [[part, [[1, content], [2, 1]]], [8, [[1, []]]], [9, [[1, b"a filter"]]], [11, [[1, 2]]]]
        for part, content in ((4, b'{"model":"m"}'), (5, b"data: x"), (6, [[1, b"x"]]), (7, [[1, b"x"]]))
    ]

    words: Sequence[bytes] = (
        *b":path /v1/chat/completions x-request-id content-length \x10\x01 Z\x02\x08\x02".split(),
        *b"B\x00".split(),
        *(b'{"model":"m","prompt":"', b'"messages":', b'"cache_salt":"', b":status", b"text/event-stream"),
    )

    def __init__(self) -> None:
        self.seeds: Sequence[bytes] = talk()
        self._picker = small_picker()
        self._seen = _Seen()
        self._picker.subscribe(self._seen.on_event)
        self._names = request_names(PolicySpec())
        self._now = itertools.count(1.0)
        self._stream = self._new_stream()
        self._messages = 0

    def _new_stream(self) -> HttpStream:
        self._messages = 0
        return a_stream(self._picker, StreamSettings())

    def encode(self, document: object, /) -> bytes:
        return as_protobuf(document)

    async def feed(self, data: bytes) -> bool:
        now = next(self._now)
        try:
            event = decode(
                data,
                names=self._names,
            )
            for action in self._stream.receive(event, now=now):
                assert encode(action)
        except StreamProtocolError:
            self._over(now=now)
            return False
        check_stream(self._stream)
        self._messages += 1
        if self._stream.phase in OVER or self._messages > 6:
            self._over(now=now)
        return True

    def _over(self, *, now: float) -> None:
        self._stream.close(now=now)
        self._stream = self._new_stream()

    async def check(self) -> None:
        self._over(now=next(self._now))
        assert self._seen.open == 0
        assert all(state.in_flight == 0 for state in self._picker.fleet.states())
        one_pick(self._picker, now=next(self._now))


class _Seen:
    """Counts picks whose end was never reported."""

    open = 0

    def on_event(self, event: PickerEvent) -> None:
        self.open += isinstance(event, Began) - isinstance(event, Ended)


def talk() -> list[bytes]:
    """Return the messages of one request, as Envoy sends them."""
    from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc  # noqa: PLC0415 - a second to import

    made = []
    for path in ("/v1/chat/completions", "/v1/completions", "/metrics"):
        head = ext_proc.ProcessingRequest()
        for key, value in ((":path", path), ("x-request-id", "r1"), ("content-type", "application/json")):
            head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        head.protocol_config.request_body_mode = 2
        made.append(head.SerializeToString())
    for body in (
        b'{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}',
        b'{"model":"m","prompt":"hello hello hello","cache_salt":"x"}',
        b'{"model":"m","prompt":[1,2,3,4]}',
    ):
        message = ext_proc.ProcessingRequest()
        message.request_body.body = body
        message.request_body.end_of_stream = True
        made.append(message.SerializeToString())
    answer = ext_proc.ProcessingRequest()
    answer.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    made.append(answer.SerializeToString())
    return [bytes(each) for each in made]


class Connections:
    """Frames of a connection, from its handshake on. Each input has a connection of its own. A document is a
    list of frames: kind, flags, stream, and pieces of the payload.
    """

    documents: Sequence[object] = [
        [
            [1, 4, 1, [b"\x20", block()]],
            [0, 0, 1, [b"\0\0\0\0\1", b"x"]],
            [9, 4, 1, [b""]],
            [3, 0, 1, [b"\0\0\0\x08"]],
            [4, 0, 0, [b"\0\4\0\0\0\x64"]],
            [6, 0, 0, [b"12345678"]],
            [8, 0, 0, [b"\0\0\0\1"]],
            [8, 0, 1, [b"\0\0\0\1"]],
        ]
    ]

    words: Sequence[bytes] = (
        *(ping(), reset(1), window_update(0, 1), window_update(1, 1), data(1), b"\x20", b"\x3f\xe1\x1f"),
        *(
            settings([(Setting.INITIAL_WINDOW_SIZE, 100)]),
            frame(0xFA, b"xyz"),
            headers(3),
            data(1, b"\0\0\0\0\0"),
        ),
    )

    def __init__(self) -> None:
        opening = headers(1, block()) + data(1, grpc(talk()[0]))
        self.seeds: Sequence[bytes] = [
            opening,
            opening + data(1, grpc(talk()[3])) + data(1, ends=True),
            opening + headers(3, block()) + reset(1) + reset(3),
            headers(1, block(), whole=False) + continuation(1, b"", whole=True),
        ]

    def encode(self, document: Any, /) -> bytes:
        return b"".join(
            frame(kind, b"".join(pieces), flags=flags, stream_id=number)
            for kind, flags, number, pieces in document
        )

    async def feed(self, data: bytes) -> bool:
        side = CallerSide().opened()
        side.feed(data)
        check_connection(side.connection)
        return not side.connection.over

    async def check(self) -> None: ...


class Transports(Connections):
    """Frames of a connection with the handlers of its calls and a picker behind it."""

    def __init__(self) -> None:
        super().__init__()
        head, body, answer = talk()[0], talk()[3], talk()[-1]
        piece = b"\x2a\x0c\x0a\x0adata: text"
        called = headers(1, block()) + data(1, grpc(head + b"\x5a\x04\x08\x02\x10\x04")) + data(1, grpc(body))
        self.seeds = [*self.seeds, called, called + data(1, grpc(answer)) + data(1, grpc(piece) * 2) * 3]
        self._picker, self._seen = small_picker(), _Seen()
        self._picker.subscribe(self._seen.on_event)
        self._now = 1000.0
        settings = StreamSettings(max_body_bytes=100_000)
        self._server = ExtProcServer(
            self._picker, listen=Listen(), settings=settings, clock=lambda: self._now
        )
        self._http2: Any = self._server.transport

    async def feed(self, data: bytes) -> bool:
        self._now += 0.01
        peer = LoudPeer(self._http2)
        peer.connection_made(Pipe())
        half = len(data) // 2
        for part in (hello(window=len(data)), data[:half], data[half:]):
            peer.data_received(part)
            while peer.connection.pending and not peer.connection.over:
                peer.data_received(b"")
            check_peer(peer)
        accepted = not peer.connection.over
        if half % 8 == 0:
            peer.tick(now=self._now + 400)
        peer.connection_lost(None)
        await asyncio.sleep(0)
        return accepted

    async def check(self) -> None:
        assert not self._server.streams.live, "a call outlived its connection"
        assert self._http2.held.now == self._http2.held.unsent == 0, "unfinished messages or answers are held"
        assert not self._http2.peers
        assert self._seen.open == 0
        assert all(state.in_flight == 0 for state in self._picker.fleet.states()), "a booking is left"


class LoudPeer(Peer):
    """Lets no exception of a handler pass."""

    def _gone(self, call: Call, *, now: float, broken: bool = False) -> None:
        if broken:
            raise  # noqa: PLE0704 - called while the exception is handled
        super()._gone(call, now=now)


class AccessLogMessages(OfBytes):
    """Messages in which Envoy's access log reports answers."""

    words: Sequence[bytes] = (
        *(
            b"\x0a\x08127.0.0.1",
            b"10.0.0.1",
            b"\x18\xc0\x3e",
            b"\x12\x02\x0a\x00",
            b"\x1a\x00",
            b"\x08\xc8\x01",
        ),
        *(b"upstream_reset_after_response_started", b"\x30\x01", b"\xff\xff\xff\xff\x0f"),
    )

    def __init__(self) -> None:
        self.seeds: Sequence[bytes] = access_log_messages()
        self._picker = small_picker()
        self._now = itertools.count(1.0)
        self._faults: Counter[str] = Counter()
        self._log = AccessLog(self._picker, self._fault, NotingCaller())

    def _fault(self, reason: str) -> None:
        self._faults[reason] += 1

    async def feed(self, data: bytes) -> bool:
        before = self._faults["access_log_unreadable"]
        self._log.message(data, now=next(self._now))
        return self._faults["access_log_unreadable"] == before

    async def check(self) -> None:
        assert self._faults.keys() <= {
            "access_log_unreadable",
            "access_log_too_large",
            "cut_by_unknown_server",
        }
        check_failures(self._picker.fleet.failures)
        one_pick(self._picker, now=next(self._now))


def access_log_messages() -> list[bytes]:
    """Return messages about a cut answer, about one that ended, and about both, with other fields that a
    log may have.
    """
    from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage  # noqa: PLC0415 - as above

    made = []
    for flag in ("upstream_protocol_error", ""):
        message = StreamAccessLogsMessage()
        entry = message.http_logs.log_entry.add()
        entry.common_properties.upstream_remote_address.socket_address.address = "10.0.0.1"
        entry.common_properties.upstream_remote_address.socket_address.port_value = 8000
        if flag:
            setattr(entry.common_properties.response_flags, flag, True)
        entry.response.response_code.value = 200
        made.append(message.SerializeToString())
        message.identifier.node.id = "gateway"
        message.identifier.log_name = "cut-answers"
        entry.request.path = "/v1/completions"
        entry.request.request_headers["x-request-id"] = "r"
        message.http_logs.log_entry.add().CopyFrom(entry)
        made.append(message.SerializeToString())
    return [bytes(each) for each in made]
