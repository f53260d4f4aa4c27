"""The events that the data plane sends about one HTTP request, the actions that answer them, and the body
that comes in pieces. These are plain values without gRPC and protobuf.

They separate the messages of ext_proc (`codec`, `conversation`) from the state machine (`stream`): another
protocol only has to make these events and carry out these actions. Header names may come in any case and more
than once. Values are text with one character for each byte (latin-1), so every header can be decoded.

A `Body` belongs to one stream. The `BodyRoom` belongs to all streams of a process. Invariant: the size in the
room is the sum of the sizes of its bodies. A body that was taken or dropped has size 0.
"""

import enum
from collections.abc import Sequence
from typing import Final

from msgspec import Struct


class BodyMode(enum.IntEnum):
    """How the data plane hands over a body, and when the pick is made. The numbers are those of ext_proc's
    ProcessingMode.BodySendMode.
    """

    NONE = 0
    """The request is routed by load, from its headers. Requests without a body are routed in the same way."""
    STREAMED = 1
    """The data plane chooses the server as soon as the headers are answered. The prefix is not known at that
    time, so the request is routed by load. Later chunks are answered unread.
    """
    BUFFERED = 2
    """The headers are answered at once. The one body message is answered with the pick, also if trailers
    follow.
    """
    BUFFERED_PARTIAL = 3
    """The same as BUFFERED. If the data plane cut the body at its limit, or trailers follow the body, the
    request is routed by load, since of half a JSON text only names can be read.
    """
    FULL_DUPLEX_STREAMED = 4
    """The answer to the headers waits for the whole body. Then the picker sends the answer to the headers,
    the pieces of the body and the trailers, in this order.
    """
    GRPC = 5
    """The same as FULL_DUPLEX_STREAMED."""

    def __init__(self, number: int) -> None:
        self.echoed: Final = number >= 4
        """Whether the picker must send the body back, because the data plane keeps no copy."""


class Modes(Struct, frozen=True):
    """The processing modes. Newer data planes state them in the first message of a stream."""

    request_body: BodyMode = BodyMode.NONE
    response_body: BodyMode = BodyMode.NONE


class Slot(enum.Enum):
    """The message that an event tells of, or that an answer belongs to. The values are the field names of
    ext_proc's messages.
    """

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"

    # The hash is by identity, in C. The hash of Enum is a Python function, which would be called for each
    # lookup of an answer.
    __hash__ = object.__hash__


class Headers(Struct, frozen=True, gc=False):
    slot: Slot
    headers: Sequence[tuple[str, str]]
    end_of_stream: bool = False
    modes: Modes | None = None
    subset: tuple[str, ...] | None = None
    """Of a request: raw entries of the subset hint. Each entry may be a comma list. None: no hint came."""
    served: str = ""
    """Of an answer: the server, as the data plane states it. Empty: the data plane does not state it."""
    lost: int = 0
    """Of an answer: the servers that were tried, if the last one ended the connection after it took the
    request, so that the data plane made this answer itself. 0: it is a server's answer, or the data plane
    does not say.
    """


class Piece(Struct, frozen=True, gc=False):
    """A piece of a body that came. As an action: it goes on unchanged."""

    slot: Slot
    data: bytes | memoryview
    """They may be a view of the message, so that a long prompt is not copied on its way to the parser."""
    end_of_stream: bool = False
    modes: Modes | None = None


class Trailers(Struct, frozen=True, gc=False):
    slot: Slot


HttpEvent = Headers | Piece | Trailers


class Answer(Struct, frozen=True, gc=False):
    """Go on, perhaps with changes."""

    slot: Slot
    set_headers: tuple[tuple[str, str], ...] = ()
    """Headers to overwrite or add. Not allowed for trailers."""
    remove_headers: tuple[str, ...] = ()
    destination: str = ""
    """The destination in the dynamic metadata. Empty: none is sent."""
    body: bytes | None = None
    """A whole body that replaces the request's body. None: the body goes on unchanged."""
    stream_response: bool = False
    """Ask the data plane to stream the answer's body to the picker, for this request only."""


PLAIN: Final = {slot: (Answer(slot),) for slot in Slot}
"""Go on without any change."""


class Refuse(Struct, frozen=True, gc=False):
    """Answer the client now, in most cases with an error. The request goes to no server."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    reason: str


class Delay(Struct, frozen=True, gc=False):
    """Tell the data plane that the answer comes later. The data plane waits for this time."""

    seconds: float


Action = Answer | Piece | Refuse | Delay


class StreamProtocolError(Exception):
    """The data plane sent a message that must not follow the messages before it. `reason` labels a metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


MAX_PIECE_BYTES: Final = 62_000
"""The most bytes in one piece of an echoed body: the limit of the endpoint picker protocol."""


class BodyRoom:
    """Counts the bytes of incomplete bodies, which may not exceed a bound."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class Body:
    """The pieces of one body so far. A piece that is the whole body is not copied."""

    __slots__ = ("_buffer", "_room", "has_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.has_room = True
        """Whether all bodies together were within the bound at the last piece."""
        self._buffer: bytes | memoryview | bytearray = b""

    def add(self, piece: bytes | memoryview, *, last: bool) -> bool:
        """Add the next piece. Return whether no more is awaited: the piece is the last, or all bodies
        together exceed the bound.
        """
        self._room.held_bytes += len(piece)
        if not self._buffer:
            self._buffer = piece
        else:
            if not isinstance(self._buffer, bytearray):
                self._buffer = bytearray(self._buffer)
            self._buffer += piece
        self.has_room = self._room.held_bytes <= self._room.max_bytes
        return last or not self.has_room

    def take(self) -> bytes | memoryview:
        """Return all pieces, and hold them no longer."""
        buffer = self._buffer
        self.drop()
        return memoryview(buffer) if isinstance(buffer, bytearray) else buffer

    def drop(self) -> None:
        if self._buffer:
            self._room.held_bytes -= len(self._buffer)
            self._buffer = b""

    def __len__(self) -> int:
        return len(self._buffer)


def pieces(slot: Slot, data: bytes | memoryview, *, end_of_stream: bool) -> Sequence[Piece]:
    """Return the same bytes in order, in pieces that the protocol allows. A body that ends without bytes
    gives one empty piece.
    """
    if len(data) <= MAX_PIECE_BYTES:
        return (Piece(slot, data, end_of_stream=end_of_stream),) if data or end_of_stream else ()
    view, last = memoryview(data), (len(data) - 1) // MAX_PIECE_BYTES * MAX_PIECE_BYTES
    return tuple(
        Piece(slot, view[start : start + MAX_PIECE_BYTES], end_of_stream=end_of_stream and start == last)
        for start in range(0, len(data), MAX_PIECE_BYTES)
    )
