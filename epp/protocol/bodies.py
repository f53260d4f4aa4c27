"""Holds the pieces of a request's body that come before its headers are answered, within a bound that all
requests share, and sends a body back in pieces. Pure.

A `Body` belongs to one stream. The `BodyRoom` belongs to all streams of a process. Invariant: the size in the
room is the sum of the sizes of its bodies. A body that was taken or dropped has size 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from epp.protocol.http_events import PLAIN, Action, BodyMode, Echo, RequestBody, Slot

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

    __slots__ = ("_buffer", "_room", "has_room", "size_bytes")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.has_room = True
        """Whether all bodies together were within the bound at the last piece."""
        self._buffer: bytes | memoryview | bytearray = b""
        self.size_bytes = 0
        """Bytes of all pieces so far."""

    def add(self, piece: bytes | memoryview, *, last: bool) -> bool:
        """Add the next piece. Return whether no more is awaited: the piece is the last, or all bodies
        together exceed the bound.
        """
        size = len(piece)
        self.size_bytes += size
        self._room.held_bytes += size
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
