"""gRPC messages within DATA frames: five bytes of head, then the message; frames and messages begin and end independently.

Pure. One `Assembly` for each message that a frame leaves unfinished; a message that lies whole in a frame needs none.
"""

from __future__ import annotations

from typing import Final

from epp.http2.limits import HeldBytes

PREFIX_BYTES: Final = 5
"""Whether the message is compressed, and its length."""

OK: Final = 0
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13


class BadMessageError(Exception):
    """A message that is not taken: the call ends with this status of gRPC. `reason` labels a metric."""

    def __init__(self, status: int, details: str, *, reason: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.reason = reason


class Assembly:
    """One message that comes in parts, counted in `held` for as long as it is kept."""

    __slots__ = ("_bytes", "_held", "_size")

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._bytes = bytearray()
        self._size = -1
        """Of the message with its prefix; -1: the prefix is not whole."""

    def take(self, data: bytes, at: int, end: int, *, max_bytes: int) -> int:
        """Add what `data[at:end]` holds of this message; where the rest begins. BadMessageError."""
        begun = at
        if self._size < 0:
            stop = min(end, at + PREFIX_BYTES - len(self._bytes))
            self._add(data, at, stop)
            at = stop
            if len(self._bytes) < PREFIX_BYTES:
                return at
            self._size = PREFIX_BYTES + message_bytes(self._bytes, 0, max_bytes=max_bytes)
        stop = min(end, at + self._size - len(self._bytes))
        self._add(data, at, stop)
        if begun < stop and self._held.now > self._held.most:
            raise BadMessageError(
                RESOURCE_EXHAUSTED,
                "too many unfinished messages are held; try again later",
                reason="too_much_held",
            )
        return stop

    def whole(self) -> bytes | None:
        """The message, if all of it is there; it is kept no longer then."""
        if len(self._bytes) != self._size:
            return None
        message = bytes(memoryview(self._bytes)[PREFIX_BYTES:])
        self.drop()
        return message

    def drop(self) -> None:
        """Keep nothing of it."""
        self._held.now -= len(self._bytes)
        self._bytes = bytearray()

    def _add(self, data: bytes, at: int, end: int) -> None:
        if at < end:
            self._bytes += memoryview(data)[at:end]
            self._held.now += end - at


def message_bytes(data: bytes | bytearray, at: int, *, max_bytes: int) -> int:
    """The length of the message whose prefix lies at `at`. BadMessageError where it is not to be taken."""
    if data[at]:
        if data[at] == 1:
            raise BadMessageError(
                UNIMPLEMENTED, "compressed messages are not supported; send identity", reason="compressed"
            )
        raise BadMessageError(INTERNAL, "the message's first byte is neither 0 nor 1", reason="bad_prefix")
    size = int.from_bytes(data[at + 1 : at + PREFIX_BYTES])
    if size > max_bytes:
        raise BadMessageError(
            RESOURCE_EXHAUSTED,
            f"a message of {size} bytes; at most {max_bytes} are taken",
            reason="message_too_large",
        )
    return size
