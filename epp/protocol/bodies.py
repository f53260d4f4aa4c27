"""Holds the pieces of a request's body that come before its headers are answered, within a bound that all
requests share. Finds where the JSON of the body ends, and sends a body back in pieces. Pure.

A `Body` belongs to one stream. The `BodyRoom` belongs to all streams of a process. Invariant: the size in the
room is the sum of the sizes of its bodies. A body that was taken or dropped has size 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from epp.protocol.http_events import PLAIN, Action, BodyMode, Echo, RequestBody, Slot

MAX_PIECE_BYTES: Final = 62_000
"""The most bytes in one piece of an echoed body: the limit of the endpoint picker protocol."""
_BLANK: Final = b" \t\r\n\xef\xbb\xbf"


class BodyRoom:
    """Counts the bytes of incomplete bodies, which may not exceed a bound."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class Body:
    """The pieces of one body so far. A piece that is the whole body is not copied."""

    __slots__ = (
        "_buffer", "_declared_bytes", "_end", "_hold_bytes", "_room", "has_room", "is_partial", "pieces", "size_bytes",
    )  # fmt: skip

    def __init__(self, room: BodyRoom, *, hold_bytes: int | None = None, declared_bytes: int = 0) -> None:
        """Begin a body. hold_bytes: the most bytes to await if the data plane may not report the end.
        None: the end is always reported. declared_bytes: the size that the headers state. 0: they state none.
        """
        self._room = room
        self._hold_bytes = hold_bytes
        self._declared_bytes = declared_bytes
        self.has_room = True
        """Whether all bodies together were within the bound at the last piece."""
        self.is_partial = False
        """Whether `hold_bytes` came before the end was found. The pieces may be only a part of the body."""
        self._buffer: bytes | memoryview | bytearray = b""
        self._end: JsonEnd | None = None
        self.pieces = 0
        """The number of pieces so far."""
        self.size_bytes = 0
        """Bytes of all pieces so far."""

    def add(self, piece: bytes | memoryview, *, last: bool) -> bool:
        """Add the next piece. Return whether no more is awaited: the piece is the last, all bodies together
        exceed the bound, or later pieces could not matter.
        """
        size = len(piece)
        self.pieces += 1
        self.size_bytes += size
        self._room.held_bytes += size
        if not self._buffer:
            self._buffer = piece
        else:
            if not isinstance(self._buffer, bytearray):
                self._buffer = bytearray(self._buffer)
            self._buffer += piece
        self.has_room = self._room.held_bytes <= self._room.max_bytes
        if last or not self.has_room:
            return True
        if self._hold_bytes is None:
            return False
        self.is_partial = self.size_bytes >= self._hold_bytes
        return self.is_partial or self._looks_whole(piece)

    def _looks_whole(self, piece: bytes | memoryview) -> bool:
        """Return whether the body is complete, by its declared size or by its JSON.

        If the data plane does not pass trailers on, nothing marks the end of a body that has trailers.
        """
        if self._declared_bytes:
            return self.size_bytes >= self._declared_bytes
        if self._end is None:
            self._end = JsonEnd()
        return self._end.feed(bytes(piece))

    def take(self) -> bytes | memoryview:
        """Return all pieces, and hold them no longer."""
        buffer = self._buffer
        self.drop()
        return memoryview(buffer) if isinstance(buffer, bytearray) else buffer

    def drop(self) -> None:
        if self._buffer:
            self._room.held_bytes -= len(self._buffer)
            self._buffer = b""
        self.pieces = 0

    def __len__(self) -> int:
        return len(self._buffer)


class JsonEnd:
    """Finds the end of a JSON object that comes in pieces of any size. The work is proportional
    to the bytes.
    """

    __slots__ = ("_carry", "_depth", "_in_string", "_started")

    def __init__(self) -> None:
        self._carry = b""
        """Whether the last piece ended with a backslash, which escapes the first character of the next piece.
        """
        self._depth = 0
        self._in_string = False
        self._started = False

    def feed(self, piece: bytes) -> bool:
        """Return whether the object is complete, or the body is not a JSON object at all."""
        data = self._carry + piece
        if not self._started:
            data = data.lstrip(_BLANK)
            if not data:
                return False
            self._started = True
            if not data.startswith(b"{"):
                return True
        bare = data.replace(b"\\\\", b"")
        self._carry = b"\\" if bare.endswith(b"\\") else b""
        parts = bare.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        between = b"".join(parts[self._in_string :: 2])
        self._depth += between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")
        self._in_string ^= len(parts) % 2 == 0
        return self._depth <= 0 and not self._in_string


def passed_on(event: RequestBody, mode: BodyMode) -> Sequence[Action]:
    """Pass on unchanged a piece of a request's body that is no longer read."""
    if mode.echoed:
        return pieces(Slot.REQUEST_BODY, event.data, end_of_stream=event.end_of_stream)
    return PLAIN[Slot.REQUEST_BODY]


def pieces(slot: Slot, data: bytes | memoryview, *, end_of_stream: bool) -> Sequence[Echo]:
    """Return the same bytes in order, in pieces that the protocol allows. A body that ends without bytes
    gives one empty piece.
    """
    if len(data) <= MAX_PIECE_BYTES:
        return (Echo(slot, data, end_of_stream=end_of_stream),) if data or end_of_stream else ()
    view, last = memoryview(data), (len(data) - 1) // MAX_PIECE_BYTES * MAX_PIECE_BYTES
    return tuple(
        Echo(slot, view[start : start + MAX_PIECE_BYTES], end_of_stream=end_of_stream and start == last)
        for start in range(0, len(data), MAX_PIECE_BYTES)
    )
