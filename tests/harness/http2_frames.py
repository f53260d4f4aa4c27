"""The client's half of HTTP/2, frame by frame: bytes that a test sends, right or wrong, and the server's
bytes as frames.

It follows no rules, so that a test can break them. `CallerSide` drives a `Connection` without any socket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from hpack import Decoder, Encoder, NeverIndexedHeaderTuple

from epp.transport.http2.connection import Connection
from epp.transport.http2.frames import PREFACE, Flag, Kind, Limits, Setting, frame, settings
from epp.transport.http2.messages import HeldBytes, Http2Event
from tests.invariants.transport import check_connection

PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CALL: Final = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH),
    (":authority", "picker"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)
NO_TABLE: Final = b"\x20"
"""The first byte of a header block. It says that the sender's table has size 0 from now on."""


def block(fields: Iterable[tuple[str, str]] = CALL, *, replace: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return a header block without indexing. `replace` overwrites or adds fields."""
    wanted = dict(fields) | dict(replace)
    never = [NeverIndexedHeaderTuple(name.encode(), value.encode()) for name, value in wanted.items()]
    return Encoder().encode(never, huffman=False)


def headers(number: int, data: bytes | None = None, *, ends: bool = False, whole: bool = True) -> bytes:
    flags = (Flag.END_STREAM if ends else 0) | (Flag.END_HEADERS if whole else 0)
    return frame(Kind.HEADERS, block() if data is None else data, flags=flags, stream_id=number)


def continuation(number: int, data: bytes, *, whole: bool) -> bytes:
    return frame(Kind.CONTINUATION, data, flags=Flag.END_HEADERS if whole else 0, stream_id=number)


def data(number: int, payload: bytes = b"", *, ends: bool = False, padding: int | None = None) -> bytes:
    flags = Flag.END_STREAM if ends else 0
    if padding is not None:
        flags |= Flag.PADDED
        payload = bytes((padding,)) + payload + bytes(padding)
    return frame(Kind.DATA, payload, flags=flags, stream_id=number)


def messages_in(part: bytes) -> list[bytes] | None:
    """Return the messages in a frame, or None if the last message is not whole."""
    found = []
    while part:
        size = int.from_bytes(part[1:5])
        if len(part) < 5 + size:
            return None
        found.append(part[5 : 5 + size])
        part = part[5 + size :]
    return found


def grpc(message: bytes, *, compressed: int = 0) -> bytes:
    """Return one message with its prefix."""
    return bytes((compressed,)) + len(message).to_bytes(4) + message


def reset(number: int, code: int = 8) -> bytes:
    return frame(Kind.RST_STREAM, code.to_bytes(4), stream_id=number)


def window_update(number: int, more: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, more.to_bytes(4), stream_id=number)


def ping(payload: bytes = b"12345678", *, ack: bool = False) -> bytes:
    return frame(Kind.PING, payload, flags=Flag.ACK if ack else 0)


def hello(*, window: int | None = None, ack: bool = True) -> bytes:
    """Return preface, settings, and the acknowledgement of the server's settings."""
    values = [] if window is None else [(Setting.INITIAL_WINDOW_SIZE, window)]
    return PREFACE + settings(values) + (frame(Kind.SETTINGS, flags=Flag.ACK) if ack else b"")


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    number: int
    payload: bytes

    @property
    def ends(self) -> bool:
        return bool(self.flags & Flag.END_STREAM) and self.kind in (Kind.DATA, Kind.HEADERS)

    @property
    def code(self) -> int:
        """Return the code of RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[:4] if self.kind == Kind.RST_STREAM else self.payload[4:8])


def split(wire: bytes) -> Iterator[Frame]:
    """Return the whole frames in a server's bytes."""
    at = 0
    while at < len(wire):
        high, low, kind, flags, number = struct.unpack_from(">HBBBL", wire, at)
        size = high << 8 | low
        assert at + 9 + size <= len(wire), "the server sent a part of a frame"
        yield Frame(kind, flags, number, wire[at + 9 : at + 9 + size])
        at += 9 + size


def bodies(frames: Iterable[Frame], number: int) -> bytes:
    """Return the bytes of all DATA frames of one stream."""
    return b"".join(f.payload for f in frames if f.kind == Kind.DATA and f.number == number)


@dataclass
class CallerSide:
    """A connection under test, and its answers."""

    limits: Limits = field(default_factory=lambda: Limits(max_message_bytes=2**20))
    held: HeldBytes = field(default_factory=lambda: HeldBytes(2**22))
    now: float = 100.0

    def __post_init__(self) -> None:
        self.connection = Connection(self.limits, self.held, now=self.now)
        self._decoder = Decoder()
        self.greeting = self.sent()

    def opened(self, *, window: int | None = None) -> CallerSide:
        """Return a connection after the settings of both sides."""
        assert self.feed(hello(window=window)) == []
        assert [f.kind for f in self.sent()] == [Kind.SETTINGS]
        return self

    def feed(self, *wire: bytes, limit: int = 2**31) -> list[Http2Event]:
        events = self.connection.receive(b"".join(wire), now=self.now, limit=limit)
        check_connection(self.connection)
        return events

    def tick(self, seconds: float) -> list[Http2Event]:
        """Move the time of the connection forward."""
        self.now += seconds
        events = self.connection.tick(now=self.now)
        check_connection(self.connection)
        return events

    def sent(self) -> list[Frame]:
        """Return the server's frames since the last call."""
        return list(split(self.connection.data_to_send()))

    def fields(self, answer: Frame) -> dict[str, str]:
        """Return the headers of a HEADERS frame. Call it once for each frame, in order."""
        return {str(name): str(value) for name, value in self._decoder.decode(answer.payload)}

    def status(self, answers: Sequence[Frame]) -> tuple[int, str]:
        """Return the end of a call: gRPC's status and its text, from the last HEADERS frame."""
        found = [self.fields(f) for f in answers if f.kind == Kind.HEADERS]
        return int(found[-1]["grpc-status"]), found[-1].get("grpc-message", "")
