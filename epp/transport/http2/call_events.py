"""The events that a connection gives to its owner, and the inbox where they wait for the handlers of their
calls. Pure. An opened call ends exactly once: by `Gone`, or by the owner's own `end`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec import Struct

from epp.transport.http2.headers import Request


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
    """The call has ended, but its owner did not end it. `reason`: `reset` if the peer reset it, else the
    fault.
    """

    stream_id: int
    reason: str


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
