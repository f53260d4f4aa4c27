"""gRPC messages in DATA frames: a head of five bytes, then the message. Borders of frames and of messages are
independent.

Pure. Each message that a frame leaves unfinished has an `Assembly`. A message that is complete within one
frame needs none.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

PREFIX_BYTES: Final = 5
read_prefix: Final = struct.Struct(">BL").unpack_from
"""Returns whether the message is compressed, and its length."""

_FEW: Final = 64
_PART_BYTES: Final = 1024
"""If parts are smaller than this on average, they are joined now and then."""

Reply = Callable[[bytes, int, int], bytes | None]
"""The answer to the messages in `data[at:end]`, both with gRPC's heads. None: the owner must see them."""

OK: Final = 0
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13


class BadMessageError(Exception):
    """A message is refused, and its call ends with this gRPC status. `reason` labels a metric."""

    def __init__(self, status: int, details: str, *, reason: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.reason = reason


@dataclass(slots=True, eq=False)
class Holder:
    """The unfinished messages of one connection."""

    now: int = 0
    messages: OrderedDict[Assembly, None] = field(default_factory=OrderedDict)
    """The oldest first."""
    torn: list[int] = field(default_factory=list)
    """Streams that have lost the bytes of a message."""


@dataclass(slots=True)
class HeldBytes:
    """The bytes that all connections together hold: unfinished messages, and answers that nobody has read."""

    most: int
    """The bound of either kind."""
    now: int = 0
    """Bytes of unfinished messages."""
    unsent: int = 0
    """Bytes of answers that wait for a peer's window."""
    messages: OrderedDict[Assembly, None] = field(default_factory=OrderedDict)
    """The unfinished messages, the oldest first."""

    def make_room(self, holder: Holder) -> None:
        """Throw away the oldest messages while there are too many bytes: first those of a holder that has
        several and more than its share, half of the bytes. A peer that sends its messages to their ends holds
        none for long, so a newcomer does not pay for those who hold back.
        """
        while 2 * holder.now > self.most and len(holder.messages) > 1:
            next(iter(holder.messages)).lose("too_much_held")
        while self.now > self.most:
            next(iter(self.messages)).lose("too_much_held")

    def expire(self, *, began_before: float) -> None:
        """Throw away the messages that began too long ago."""
        while self.messages and (oldest := next(iter(self.messages))).began < began_before:
            oldest.lose("message_too_slow")


class Assembly:
    """One message that comes in several parts. Its bytes count in `held` while they are kept."""

    __slots__ = ("_have", "_held", "_holder", "_number", "_parts", "_prefix", "_size", "began", "lost")

    def __init__(self, held: HeldBytes, number: int, *, holder: Holder, now: float) -> None:
        """Begin a message of stream `number`. If its bytes are thrown away, the holder notes the number."""
        self._held = held
        self._holder = holder
        self._number = number
        self.began = now
        self.lost = ""
        """Why the bytes were thrown away. Empty: they were not."""
        held.messages[self] = holder.messages[self] = None
        self._prefix = b""
        self._size = -1
        """Length of the message. -1: its prefix is not complete yet."""
        self._parts: list[bytes] = []
        self._have = 0

    def take(self, data: bytes, at: int, end: int, *, max_bytes: int) -> int:
        """Add the bytes of `data[at:end]` that belong to this message. Returns where the rest begins. Raises
        BadMessageError.
        """
        self.require_whole()
        if self._size < 0:
            stop = min(end, at + PREFIX_BYTES - len(self._prefix))
            self._prefix += data[at:stop]
            at = stop
            if len(self._prefix) < PREFIX_BYTES:
                return at
            self._size = message_bytes(self._prefix, 0, max_bytes=max_bytes)
        stop = min(end, at + self._size - self._have)
        if at < stop:
            self._add(data[at:stop])
        return stop

    def whole(self) -> bytes | None:
        """Return the message, if it is complete. The assembly then keeps nothing of the message."""
        if self._have != self._size:
            return None
        message = b"".join(self._parts)
        self.drop()
        return message

    def drop(self) -> None:
        for owner in (self._held, self._holder):
            owner.messages.pop(self, None)
            owner.now -= self._have
        self._parts, self._have = [], 0

    def lose(self, reason: str) -> None:
        """Throw away the bytes. The call ends with the next look at it."""
        self.drop()
        self.lost = reason
        self._holder.torn.append(self._number)

    def require_whole(self) -> None:
        """Raise BadMessageError if bytes were thrown away."""
        if self.lost:
            raise BadMessageError(
                RESOURCE_EXHAUSTED, "the message stayed unfinished for too long", reason=self.lost
            )

    def _add(self, part: bytes) -> None:
        self._parts.append(part)
        self._have += len(part)
        self._held.now += len(part)
        self._holder.now += len(part)
        self._held.make_room(self._holder)
        self.require_whole()
        if len(self._parts) > _FEW + self._have // _PART_BYTES:
            self._parts = [b"".join(self._parts)]  # Each tiny part would take many times its size in memory.


def message_bytes(data: bytes, at: int, *, max_bytes: int) -> int:
    """Return the length of the message whose prefix is at `at`. Raises BadMessageError if the message is
    refused.
    """
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
