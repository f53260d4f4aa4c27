"""gRPC messages in DATA frames (a head of five bytes, then the message), and the events that a connection
gives to its owner, with the inbox where they wait for the handlers of their calls. Pure.

Borders of frames and of messages are independent. Each message that a frame leaves unfinished has an
`Assembly`. An opened call ends exactly once: by `Gone`, or by the owner's own `end`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from epp.transport.http2.headers import Request

PREFIX_BYTES: Final = 5
read_prefix: Final = struct.Struct(">BL").unpack_from
"""Returns whether the message is compressed, and its length."""
pack_prefix: Final = struct.Struct(">BL").pack
"""Takes the same."""

_FEW: Final = 64
_PART_BYTES: Final = 1024
"""If parts are smaller than this on average, they are joined now and then."""

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


class Fault(Struct, frozen=True, gc=False):
    """The peer broke a rule and so lost a stream or the connection, or it opened a stream that is not a gRPC
    call. This event is for the metrics.
    """

    reason: str


Event = Opened | Message | HalfClosed | Gone | Fault
Waiting = Message | HalfClosed | Gone

_EVENT_BYTES: Final = 200
"""Memory that a waiting event takes besides its message."""


class Inbox:
    """The events that wait: those of calls that have begun, and those of new calls, each in the order
    in which they came.

    A begun call has already waited once. If its later messages waited among new calls, it would wait again
    for each message. Here a call waits only before it begins. The owner checks `held_bytes` and stops reading
    if necessary.
    """

    def __init__(self) -> None:
        self.new: set[int] = set()
        """Calls none of whose messages has been handled. The owner adds each opened call."""
        self.waiting: dict[int, int] = {}
        """How many events of each call wait."""
        self.held_bytes = 0
        self._of_begun: deque[tuple[float, Waiting]] = deque()
        self._of_new: deque[tuple[float, Waiting]] = deque()

    def __bool__(self) -> bool:
        return bool(self.waiting)

    @property
    def of_begun(self) -> bool:
        """Whether events of begun calls wait."""
        return bool(self._of_begun)

    def add(self, event: Waiting, *, came_after: float) -> None:
        number = event.stream_id
        self.waiting[number] = self.waiting.get(number, 0) + 1
        self.held_bytes += _bytes(event)
        (self._of_new if number in self.new else self._of_begun).append((came_after, event))

    def take(self, *, new: bool) -> tuple[float, Waiting] | None:
        """Return the next event of the begun calls, or of the new ones, with the moment after which it came.
        A new call has begun when none of its events waits any more. None: no event waits.
        """
        line = self._of_new if new else self._of_begun
        if not line:
            return None
        came_after, event = line.popleft()
        number = event.stream_id
        self.held_bytes -= _bytes(event)
        left = self.waiting.pop(number) - 1
        if left:
            self.waiting[number] = left
        else:
            self.new.discard(number)
        return came_after, event

    def check_integrity(self) -> None:
        events = [event for _, event in (*self._of_begun, *self._of_new)]
        assert self.held_bytes == sum(map(_bytes, events))
        assert len(events) == sum(self.waiting.values())
        assert all(event.stream_id in self.new for _, event in self._of_new)


def _bytes(event: Waiting) -> int:
    return _EVENT_BYTES + (len(event.data) if type(event) is Message else 0)
