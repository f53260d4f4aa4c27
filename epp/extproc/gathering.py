"""The body of a request while it comes in pieces: one growing buffer, within a bound that all requests share.

`Body` belongs to one stream, `BodyRoom` to all of a process. Invariant: what a room holds is the sum of what its bodies hold; a
body that was taken or dropped holds nothing. Pure; used by `stream`.
"""

from __future__ import annotations

from typing import Final

_BLANK: Final = b" \t\r\n\xef\xbb\xbf"
_BACKSLASH: Final = ord("\\")


class BodyRoom:
    """How many bytes of bodies may wait at once for the rest of them."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class Body:
    """What came of one body. A piece that is the whole body is not copied."""

    __slots__ = ("_buffer", "_end", "_room", "pieces", "size_bytes")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._buffer: bytes | memoryview | bytearray = b""
        self._end: JsonEnd | None = None
        self.pieces = 0
        """Since the last `take`."""
        self.size_bytes = 0
        """Of all that ever came, taken or not."""

    def add(self, piece: bytes | memoryview) -> bool:
        """Take in the next piece. False: there is no more room for all bodies together; this piece is held all the same."""
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
        return self._room.held_bytes <= self._room.max_bytes

    def looks_whole(self, piece: bytes | memoryview) -> bool:
        """Whatever followed could not matter, by its JSON. Call it with each piece, once, in order."""
        if self._end is None:
            self._end = JsonEnd()
        return self._end.feed(bytes(piece))

    def take(self) -> bytes | memoryview:
        """All that is held; it is held no more."""
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
    """Finds the end of a JSON object that comes in pieces of any size, with work in proportion to their bytes."""

    __slots__ = ("_carry", "_depth", "_in_string", "_started")

    def __init__(self) -> None:
        self._carry = b""
        """A backslash at the end of a piece: what it escapes comes with the next one."""
        self._depth = 0
        self._in_string = False
        self._started = False

    def feed(self, piece: bytes) -> bool:
        """Whether the object is complete, or the body is no JSON object at all."""
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
