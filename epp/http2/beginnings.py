"""New calls that are not served yet. They wait in order until the messages of all begun calls have been
handled.

A begun call has already waited once. If its later messages waited in the same queue as new calls, it would
wait again for each message. Here a call waits only before it begins. This object holds the waiting messages,
so its owner checks `held_bytes` and stops reading if necessary. Pure; one for each connection.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from epp.http2.call_events import HalfClosed, Message

_EVENT_BYTES: Final = 200
"""Memory that a queued event takes besides its message."""


class Beginnings:
    def __init__(self) -> None:
        self.calls: set[int] = set()
        """Calls that are not served yet: those that wait here, and those without any message so far. The
        owner adds each opened call, and removes a call whose first message it serves at once."""
        self.held_bytes = 0
        self._line: OrderedDict[int, deque[tuple[float, Message | HalfClosed]]] = OrderedDict()
        """The events of each waiting call and the times when they came, the oldest call first. (A plain dict
        finds its first key slowly after many deletions before it.)"""

    def __bool__(self) -> bool:
        return bool(self._line)

    def add(self, event: Message | HalfClosed, *, came_after: float) -> None:
        line = self._line.get(event.stream_id)
        if line is None:
            line = self._line[event.stream_id] = deque()
        line.append((came_after, event))
        self.held_bytes += _bytes(event)

    def take(self) -> tuple[float, Message | HalfClosed]:
        """Return the next event of the call that has waited longest, with the moment after which the event
        came.
        """
        stream_id, line = next(iter(self._line.items()))
        came_after, event = line.popleft()
        self.held_bytes -= _bytes(event)
        if not line:
            del self._line[stream_id]
            self.calls.discard(stream_id)
        return came_after, event

    def gone(self, stream_id: int) -> None:
        """Forget one of `calls`, since no caller waits for its answer any more."""
        self.calls.discard(stream_id)
        for _, event in self._line.pop(stream_id, ()):
            self.held_bytes -= _bytes(event)

    def check_integrity(self) -> None:
        assert all(self._line.values())
        assert self._line.keys() <= self.calls
        assert self.held_bytes == sum(_bytes(event) for line in self._line.values() for _, event in line)


def _bytes(event: Message | HalfClosed) -> int:
    return _EVENT_BYTES + (len(event.data) if type(event) is Message else 0)
