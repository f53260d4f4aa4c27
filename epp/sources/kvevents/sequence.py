"""Checks the order of one server's messages: which is next, which were missed, and whether the same process
still sends them.

A publisher numbers its messages from 0 and keeps the newest for replays. A number that is higher than
expected means a gap. Then a replay is requested that begins one message before the gap, and published
messages wait in their socket until it is over. The first replayed message must have the time of the last one
that we know. If it differs, or if a lower number comes with a later time, another process sends, and
everything that was known of the server is forgotten. It is also forgotten if no replay closes the gap,
because blocks that were removed in the gap would otherwise be believed to be there for ever.

Pure: `due` says what to request. The owner of the sockets requests it, and passes the answers in. Callers:
`sockets`, tests.
"""

import enum
import struct
from typing import Final

_TIME: Final = struct.Struct(">xcd")
"""How a message begins: with an array, whose first value is the server's time."""
_FLOAT: Final = b"\xcb"


class Forget(enum.Enum):
    """Why to forget the server's blocks: they belong to another process, or removals are missing."""

    RESTART = "restart"
    GAP = "gap"


Step = bytes | Forget
"""What to do: apply this message, or forget the server's blocks."""


class Messages:
    """The messages of one server. Each method returns the steps to do now, in order.

    gaps: counts all gaps under `found`, and those that no replay closed under `lost`. Servers may share it.
    """

    def __init__(self, *, replays: bool, gaps: dict[str, int]) -> None:
        self._replays = replays
        self._gaps = gaps
        self._next: int | None = None
        """The number of the next message. None: no message of this process was delivered yet."""
        self._last_s = 0.0
        """The time of the last delivered message, by the server's clock."""
        self._newest_live = -1
        self._missing: int | None = None
        """The first number of the gap for which a replay is due."""
        self.due: int | None = 0 if replays else None
        """The number from which to request a replay, until it has ended or failed. None: nothing is missing.
        """
        self.complete = False
        """Whether all messages of this process were delivered. Then the server lacks every block that it is
        not known to hold."""

    def live(self, number: int, payload: bytes) -> list[Step]:
        """Called when a message came as it was published. While a replay is due, it must wait."""
        assert self.due is None, "published messages wait for the end of a replay"
        newest, self._newest_live = self._newest_live, number
        steps: list[Step] = []
        if self._next is not None and number < self._next:
            if number > newest and _time_s(payload) <= self._last_s:
                return []  # the replay already brought this message
            steps = self.restarted()
            if self._replays:
                return steps  # the replay brings this message again
            self._newest_live = number
        elif self._next is not None and number > self._next:
            self._gaps["found"] += 1
            if self._replays:
                self._missing, self.due = self._next, self._next - 1  # the replay brings this message again
                return []
        return [*steps, *self._deliver(number, payload)]

    def replayed(self, number: int, payload: bytes) -> list[Step]:
        """Called when a message of a replay came."""
        steps: list[Step] = []
        if self._next is not None and number < self._next:
            if _time_s(payload) == self._last_s:
                return []
            steps = self.restarted()
            if number:
                return steps  # another replay is due
        return [*steps, *self._deliver(number, payload)]

    def replay_over(self) -> list[Step]:
        """Called when the server has replayed all messages that it keeps, or did not answer in time. Continue
        with the published messages.
        """
        missing, self._missing, self.due = self._missing, None, None
        return [self._lose()] if missing is not None and missing == self._next else []

    def restarted(self) -> list[Step]:
        """Another process sends now. Other parts of the picker may know this first."""
        self._next, self._missing, self.complete, self._newest_live = None, None, False, -1
        self.due = 0 if self._replays else None
        return [Forget.RESTART]

    def _deliver(self, number: int, payload: bytes) -> list[Step]:
        steps: list[Step] = []
        if self._next is None:
            self.complete = number == 0
        elif number > self._next:  # no replay brings what is missing
            steps.append(self._lose())
        self._next, self._last_s = number + 1, _time_s(payload)
        return [*steps, payload]

    def _lose(self) -> Forget:
        self._gaps["lost"] += 1
        self._next, self.complete = None, False
        return Forget.GAP


def _time_s(payload: bytes) -> float:
    """Return the time of a message. Bytes that do not begin with a time have the time 0."""
    if len(payload) < _TIME.size:
        return 0.0
    kind, time_s = _TIME.unpack_from(payload)
    return float(time_s) if kind == _FLOAT else 0.0
