"""The events of one connection that wait for their handlers: those of calls that have begun, and those of new
calls, each in the order in which they came.

A begun call has already waited once. If its later messages waited among new calls, it would wait again for
each message. Here a call waits only before it begins. The owner checks `held_bytes` and stops reading if
necessary. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from epp.transport.http2.call_events import Gone, HalfClosed, Message

_EVENT_BYTES: Final = 200
"""Memory that a waiting event takes besides its message."""

Waiting = Message | HalfClosed | Gone


class Inbox:
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
