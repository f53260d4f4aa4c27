"""Checks the order of one server's messages: which is next, which were missed, and whether the same process
still sends them.

A publisher numbers its messages from 0 and keeps the newest for replays. A number that is higher than
expected means a gap. Messages are then held back, and a replay is requested that begins one message before
the gap. This message must equal the one that we know. If it differs, or if a number comes again with other
content, another process sends, and everything that was known of the server is forgotten. It is also forgotten
if no replay closes the gap, because blocks that were removed in the gap would otherwise be believed to be
there for ever.

Pure: `due` says what to request. The owner of the sockets requests it, and passes the answers in. Callers:
`service`, tests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

import xxhash

_MAX_HELD_BACK: Final = 10_000
"""Most messages that wait for a replay. With more, the replay is given up."""
_MAX_HELD_BACK_BYTES: Final = 64 << 20
_KNOWN: Final = 256
"""Number of the last messages whose content is remembered. A replay and the published messages overlap by
less."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message to apply. Messages come in order."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget the server's blocks: they belong to another process, or removals are missing."""

    reason: Literal["restart", "gap"]


Step = Deliver | Forget


class Sequence:
    """The messages of one server. Each method returns the steps to do now, in order."""

    def __init__(self, *, replays: bool) -> None:
        self._replays = replays
        self._next: int | None = None
        """The number of the next message. None: no message of this process was delivered yet."""
        self._known: dict[int, int] = {}
        """Digests of the last delivered messages."""
        self._newest_live = -1
        self._held_back: deque[tuple[int, bytes]] = deque()
        self._held_back_bytes = 0
        self._asked_from: int | None = 0 if replays else None
        self.asked = 1 if replays else 0
        """Counts the requested replays. Results of an earlier replay are ignored."""
        self.complete = False
        """Whether all messages of this process were delivered. Then the server lacks every block that it is
        not known to hold."""
        self.gaps = 0
        self.lost = 0
        """Number of gaps that no replay closed."""

    @property
    def due(self) -> int | None:
        """The number from which to request a replay, until it ended or failed. None: nothing is missing."""
        return self._asked_from

    def live(self, number: int, payload: bytes) -> list[Step]:
        """Called when a message came as it was published."""
        if number <= self._newest_live:
            forget = self._restart()
            self._newest_live = number
            return [forget, *self._continue(number, payload)]
        self._newest_live = number
        if self._asked_from is None:
            return self._continue(number, payload)
        self._hold_back(number, payload)
        too_much = len(self._held_back) > _MAX_HELD_BACK or self._held_back_bytes > _MAX_HELD_BACK_BYTES
        return self.replay_over() if too_much else []

    def replayed(self, number: int, payload: bytes) -> list[Step]:
        """Called when a message of a replay came."""
        if self._asked_from is None:
            return []
        if self._next is None:
            self.complete = number == 0
        elif number < self._next:
            return [] if self._known.get(number) == _digest(payload) else [self._restart()]
        elif number > self._next:  # the server keeps fewer messages than were missed
            return [self._lose(), self._deliver(number, payload)]
        return [self._deliver(number, payload)]

    def replay_over(self) -> list[Step]:
        """Called when the server has replayed all messages that it keeps, or did not answer in time. Continue
        with the published messages.
        """
        self._asked_from = None
        held_back, self._held_back, self._held_back_bytes = self._held_back, deque(), 0
        steps: list[Step] = []
        for n, (number, payload) in enumerate(held_back):
            if self._asked_from is not None:  # this is another process
                for later in list(held_back)[n:]:
                    self._hold_back(*later)
                break
            if self._next is not None and number > self._next:
                steps += [self._lose(), self._deliver(number, payload)]
            elif self._next is None or number >= self._next or number in self._known:
                steps += self._continue(number, payload)
            # otherwise the message is older than the replay
        return steps

    def restarted(self) -> list[Step]:
        """Another part of the picker knows that another process sends now."""
        return [self._restart()]

    def _continue(self, number: int, payload: bytes) -> list[Step]:
        if self._next is None:
            if number == 0 or self._asked_from is None:
                self.complete = number == 0
                self._asked_from = None
                return [self._deliver(number, payload)]
        elif number < self._next:
            if self._known.get(number) == _digest(payload):
                return []  # the replay already brought this message
            forget = self._restart()
            self._newest_live = number
            return [forget, *self._continue(number, payload)]
        elif number == self._next:
            return [self._deliver(number, payload)]
        else:
            self.gaps += 1
            if not self._replays:
                return [self._lose(), self._deliver(number, payload)]
            self._ask(self._next - 1)
        self._hold_back(number, payload)
        return []

    def _hold_back(self, number: int, payload: bytes) -> None:
        self._held_back.append((number, payload))
        self._held_back_bytes += len(payload)

    def _deliver(self, number: int, payload: bytes) -> Deliver:
        self._next = number + 1
        self._known[number] = _digest(payload)
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return Deliver(payload)

    def _ask(self, number: int) -> None:
        self._asked_from = number
        self.asked += 1

    def _restart(self) -> Forget:
        self._next, self.complete, self._newest_live = None, False, -1
        self._known.clear()
        self._held_back.clear()
        self._held_back_bytes = 0
        if self._replays:
            self._ask(0)
        return Forget("restart")

    def _lose(self) -> Forget:
        self.lost += 1
        self.complete = False
        self._known.clear()
        return Forget("gap")

    def check_integrity(self) -> None:
        assert len(self._held_back) <= _MAX_HELD_BACK + 1
        assert self._held_back_bytes == sum(len(payload) for _, payload in self._held_back)
        assert not self._held_back or self._asked_from is not None, "held back with nothing to wait for"
        assert self._next is not None or not self.complete
        assert len(self._known) <= _KNOWN
        assert all(self._next is not None and number < self._next for number in self._known)


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)
