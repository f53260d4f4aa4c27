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
"""Of an event in this line, beside the message in it."""


class Beginnings:
    def __init__(self) -> None:
        self.calls: set[int] = set()
        """That nobody has begun to serve: those that wait, and those of which no message has come.
        The owner adds a call that was opened, and takes it out where it serves its first message at once."""
        self.held_bytes = 0
        self._line: OrderedDict[int, deque[tuple[float, Message | HalfClosed]]] = OrderedDict()
        """What came of the calls that wait, with when it came; the oldest call first.
        (The first key of a plain dict is slow to find once many before it are deleted.)"""

    def __bool__(self) -> bool:
        """Whether a call waits."""
        return bool(self._line)

    def add(self, event: Message | HalfClosed, *, came_after: float) -> None:
        """What came for one of `calls` waits with it."""
        line = self._line.get(event.stream_id)
        if line is None:
            line = self._line[event.stream_id] = deque()
        line.append((came_after, event))
        self.held_bytes += _bytes(event)

    def take(self) -> tuple[float, Message | HalfClosed]:
        """The next event of the call that has waited longest, with the moment after which the event came."""
        stream_id, line = next(iter(self._line.items()))
        came_after, event = line.popleft()
        self.held_bytes -= _bytes(event)
        if not line:
            del self._line[stream_id]
            self.calls.discard(stream_id)
        return came_after, event

    def gone(self, stream_id: int) -> None:
        """One of `calls` is over: nobody waits for an answer."""
        self.calls.discard(stream_id)
        for _, event in self._line.pop(stream_id, ()):
            self.held_bytes -= _bytes(event)

    def check_integrity(self) -> None:
        assert all(self._line.values())
        assert self._line.keys() <= self.calls
        assert self.held_bytes == sum(_bytes(event) for line in self._line.values() for _, event in line)


def _bytes(event: Message | HalfClosed) -> int:
    return _EVENT_BYTES + (len(event.data) if type(event) is Message else 0)
