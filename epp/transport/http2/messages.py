"""gRPC messages in DATA frames (a head of five bytes, then the message), the events that a connection gives
to its owner, and the header blocks of answers. Pure.

Borders of frames and of messages are independent. Each message that a frame leaves unfinished has an
`Assembly`. An opened call ends exactly once: by `Gone`, or by the owner's own `end`.
"""

from __future__ import annotations

import functools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Final, final
from urllib.parse import quote

from hpack import Encoder, NeverIndexedHeaderTuple
from msgspec import Struct

from epp.transport.http2.frames import Request

PREFIX_BYTES: Final = 5
read_prefix: Final = struct.Struct(">BL").unpack_from
"""Returns whether the message is compressed, and its length."""
pack_prefix: Final = struct.Struct(">BL").pack
"""Takes the same."""

Reply = Callable[[bytes, int, int], bytes | None]
"""The answer to the messages in `data[at:end]`, both with gRPC's heads. None: the owner must see them."""

OK: Final = 0
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13


class BadMessageError(Exception):
    """A message is refused, and its call ends with this gRPC status. `reason` labels a metric."""

    def __init__(self, status: int, details: str, *, reason: str) -> None:
        super().__init__(details)
        self.status = status
        self.reason = reason


@dataclass(slots=True)
class HeldBytes:
    """The bytes that all connections hold together, or that one of them holds: unfinished messages, and
    answers that nobody has read.
    """

    most: int
    """The bound of either kind."""
    now: int = 0
    """Bytes of unfinished messages."""
    unsent: int = 0
    """Bytes of answers that wait for a peer's window."""
    messages: OrderedDict[Assembly, None] = field(default_factory=OrderedDict)
    """The unfinished messages, the oldest first."""
    torn: list[int] = field(default_factory=list)
    """Of one connection: streams that have lost the bytes of a message."""

    def of_a_connection(self) -> HeldBytes:
        """Return the record of one connection, whose share is half of the bytes."""
        return HeldBytes(self.most // 2)

    def make_room(self, own: HeldBytes) -> None:
        """Throw away the oldest messages while there are too many bytes: first those of the connection with
        the newest bytes, if it has several and more than its share. A peer that sends its messages to their
        ends holds none for long, so a newcomer does not pay for those who hold back.
        """
        while own.now > own.most and len(own.messages) > 1:
            next(iter(own.messages)).lose("too_much_held")
        while self.now > self.most:
            next(iter(self.messages)).lose("too_much_held")

    def expire(self, *, began_before: float) -> None:
        """Throw away the messages that began too long ago."""
        while self.messages and (oldest := next(iter(self.messages))).began < began_before:
            oldest.lose("message_too_slow")


class Assembly:
    """One message that comes in several parts. Its bytes count in `held` and `own` while they are kept."""

    __slots__ = ("_bytes", "_held", "_kept", "_number", "_own", "_prefix", "_size", "began", "lost")

    def __init__(self, held: HeldBytes, number: int, *, own: HeldBytes, now: float) -> None:
        """Begin a message of stream `number`. own: the record of its connection, which notes the number if
        the bytes are thrown away.
        """
        self._held = held
        self._own = own
        self._number = number
        self.began = now
        self.lost: BadMessageError | None = None
        """Why the bytes were thrown away. None: they were not."""
        held.messages[self] = own.messages[self] = None
        self._prefix = b""
        self._size = -1
        """Length of the message. -1: its prefix is not complete yet."""
        self._bytes = BytesIO()
        self._kept = 0
        """How many bytes are counted. `_bytes` loses all of them when it finds no memory for more."""

    def take(self, data: bytes, at: int, end: int, *, max_bytes: int) -> int:
        """Add the bytes of `data[at:end]` that belong to this message. Returns where the rest begins. Raises
        BadMessageError.
        """
        if self.lost is not None:
            raise self.lost
        if self._size < 0:
            stop = min(end, at + PREFIX_BYTES - len(self._prefix))
            self._prefix += data[at:stop]
            at = stop
            if len(self._prefix) < PREFIX_BYTES:
                return at
            self._size = message_bytes(self._prefix, 0, max_bytes=max_bytes)
        stop = min(end, at + self._size - self._kept)
        if at < stop:
            self._bytes.write(memoryview(data)[at:stop])
            self._count(stop - at)
            self._held.make_room(self._own)
            if self.lost is not None:
                raise self.lost
        return stop

    def whole(self) -> bytes | None:
        """Return the message if it is complete. The assembly then keeps nothing of the message."""
        if self._kept != self._size:
            return None
        message = self._bytes.getvalue()  # the buffer itself, not a copy
        self.drop()
        return message

    def drop(self) -> None:
        for record in (self._held, self._own):
            record.messages.pop(self, None)
        self._count(-self._kept)
        self._bytes = BytesIO()

    def _count(self, more: int) -> None:
        self._kept += more
        self._held.now += more
        self._own.now += more

    def lose(self, reason: str) -> None:
        """Throw away the bytes. The call ends with the next look at it."""
        self.drop()
        text = "the message stayed unfinished for too long"
        self.lost = BadMessageError(RESOURCE_EXHAUSTED, text, reason=reason)
        self._own.torn.append(self._number)


def message_bytes(data: bytes, at: int, *, max_bytes: int) -> int:
    """Return the length of the message whose prefix is at `at`. Raises BadMessageError if the message is
    refused.
    """
    compressed, size = read_prefix(data, at)
    if compressed == 1:
        text = "compressed messages are not supported; send identity"
        raise BadMessageError(UNIMPLEMENTED, text, reason="compressed")
    if compressed:
        raise BadMessageError(INTERNAL, "the message's first byte is neither 0 nor 1", reason="bad_prefix")
    if size > max_bytes:
        text = f"a message of {size} bytes; at most {max_bytes} are taken"
        raise BadMessageError(RESOURCE_EXHAUSTED, text, reason="message_too_large")
    return int(size)


@final
class Opened(Struct, frozen=True, gc=False):
    stream_id: int
    request: Request


class Message(Struct, frozen=True, gc=False):
    """One gRPC message, whole, without its prefix."""

    stream_id: int
    data: bytes


class HalfClosed(Struct, frozen=True, gc=False):
    """The peer has ended its side of the stream."""

    stream_id: int


class Gone(Struct, frozen=True, gc=False):
    """The call has ended, but its owner did not end it."""

    stream_id: int


@final
class Fault(Struct, frozen=True, gc=False):
    """The peer broke a rule and so lost a stream or the connection, or it opened a stream that is not a gRPC
    call. This event is for the metrics.
    """

    reason: str


Http2Event = Opened | Message | HalfClosed | Gone | Fault


def memory_bytes(event: Http2Event) -> int:
    """Return about how much memory an event takes while it waits."""
    return 200 + (len(event.data) if type(event) is Message else 0)


# -- header blocks of answers --------------------------------------------------------------------------------


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return a header block without the dynamic table, so the same bytes mean the same on every connection.
    The block sets the table to size 0, which is valid for any size that the peer allows.
    """
    never = [NeverIndexedHeaderTuple(name.encode(), value.encode()) for name, value in fields]
    return b"\x20" + Encoder().encode(never, huffman=False)


_PRINTABLE: Final = bytes(range(0x20, 0x7F)).replace(b"%", b"")
"""The characters that `grpc-message` has as they are."""
GRPC_RESPONSE: Final = encode(((":status", "200"), ("content-type", "application/grpc")))


@functools.lru_cache(maxsize=64)
def trailers(status: int, details: str, *, alone: bool) -> bytes:
    """Return the trailers of a call. alone: no response headers were sent before them."""
    fields = [(":status", "200"), ("content-type", "application/grpc")] if alone else []
    fields.append(("grpc-status", str(status)))
    if details:
        fields.append(("grpc-message", quote(details, safe=_PRINTABLE)))
    return encode(fields)


NO_CALL: Final = b"This port speaks gRPC alone: POST, with content-type application/grpc.\n"
"""The body of the answer to a stream that is not a gRPC call."""
REFUSALS: Final = {
    status: encode(
        ((":status", str(status)), ("content-type", "text/plain"), ("content-length", str(len(NO_CALL))))
    )
    for status in (405, 415)
}
"""The header blocks of this answer, by its status."""
