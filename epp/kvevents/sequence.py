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
"""Messages that wait for a replay; with more, the replay is not worth waiting for."""
_MAX_HELD_BACK_BYTES: Final = 64 << 20
_KNOWN: Final = 256
"""Of the delivered messages so many are known by their content:
a replay and what is published overlap by less."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message in its order, to be applied."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """What was known of the server's blocks is void:
    it was another process's, or removals are missing from it.
    """

    reason: Literal["restart", "gap"]


Step = Deliver | Forget


class Sequence:
    """One server's messages. The methods give what is to be done now, in order."""

    def __init__(self, *, replays: bool) -> None:
        self._replays = replays
        self._next: int | None = None
        """The number that continues what was delivered; None: nothing was, of this process."""
        self._known: dict[int, int] = {}
        """Digests of the last delivered messages."""
        self._newest_live = -1
        self._held_back: deque[tuple[int, bytes]] = deque()
        self._held_back_bytes = 0
        self._asked_from: int | None = 0 if replays else None
        self.asked = 1 if replays else 0
        """Counts the replays that became due: what comes of an earlier one is void."""
        self.complete = False
        """All messages of this process were delivered: a block that is not known to be held is not held."""
        self.gaps = 0
        """Times at which messages were missing."""
        self.lost = 0
        """Gaps that no replay closed."""

    @property
    def due(self) -> int | None:
        """The number to ask a replay from, until it ended or failed; None: nothing is missing."""
        return self._asked_from

    def live(self, number: int, payload: bytes) -> list[Step]:
        """A message as it is published."""
        if number <= self._newest_live:
            forget = self._start_anew()
            self._newest_live = number
            return [forget, *self._continue(number, payload)]
        self._newest_live = number
        if self._asked_from is None:
            return self._continue(number, payload)
        self._hold_back(number, payload)
        too_much = len(self._held_back) > _MAX_HELD_BACK or self._held_back_bytes > _MAX_HELD_BACK_BYTES
        return self.replay_over() if too_much else []

    def replayed(self, number: int, payload: bytes) -> list[Step]:
        """A message that was asked for."""
        if self._asked_from is None:
            return []
        if self._next is None:
            self.complete = number == 0
        elif number < self._next:
            return [] if self._known.get(number) == _digest(payload) else [self._start_anew()]
        elif number > self._next:  # the server keeps less than was missed
            return [self._lose(), self._deliver(number, payload)]
        return [self._deliver(number, payload)]

    def replay_over(self) -> list[Step]:
        """All was replayed that the server keeps, or no answer came in time: go on with what is published."""
        self._asked_from = None
        held_back, self._held_back, self._held_back_bytes = self._held_back, deque(), 0
        steps: list[Step] = []
        for n, (number, payload) in enumerate(held_back):
            if self._asked_from is not None:  # another process after all
                for later in list(held_back)[n:]:
                    self._hold_back(*later)
                break
            if self._next is not None and number > self._next:
                steps += [self._lose(), self._deliver(number, payload)]
            elif self._next is None or number >= self._next or number in self._known:
                steps += self._continue(number, payload)
            # else it came before what the replay began with
        return steps

    def restarted(self) -> list[Step]:
        """Somebody else knows that another process sends now."""
        return [self._start_anew()]

    def _continue(self, number: int, payload: bytes) -> list[Step]:
        if self._next is None:
            if number == 0 or self._asked_from is None:
                self.complete = number == 0
                self._asked_from = None
                return [self._deliver(number, payload)]
        elif number < self._next:
            if self._known.get(number) == _digest(payload):
                return []  # the replay brought it already
            forget = self._start_anew()
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

    def _start_anew(self) -> Forget:
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
