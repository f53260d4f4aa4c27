"""Shares the time of the event loop among the connections of a server.

A connection is served when its bytes come, until the turns of this iteration of the loop have lasted too
long. From then on connections wait in a line, which is served for some milliseconds in each iteration. Who
has used the least time comes first (start-time fair queueing), so a peer with little work waits for one turn,
however much work others cause. The connections of one address count as one peer: a turn costs each of them as
many times its length as there are connections. Turns of a peer without ext_proc calls cost more.

While turns follow each other without a rest, bytes may have come at any time since the loop looked for bytes
before. `busy_since` says when that was, so that nobody takes an overload for a rest.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

AT_ONCE_S: Final = 0.002
"""After turns of this length, the loop begins a new iteration soon."""
MOST_AT_ONCE_S: Final = 0.004
"""After turns of this length, connections wait for a later iteration."""
_LINE_S: Final = 0.002
"""How long the line is served in one iteration. At least one turn is served."""
_PRICE_OF_OTHERS: Final = 8.0


class Guest(Protocol):
    """A connection that may wait for its turn."""

    urgent: bool
    """Whether the connection has had ext_proc calls."""
    used_s: float
    """The time of its turns, by their price, and not less than the time at which its last turn began."""
    source: AddressTurns

    def go_on(self) -> None:
        """Take a turn."""

    def give_way(self) -> None:
        """Close, since there are too many connections."""


@dataclass(slots=True, eq=False)
class AddressTurns:
    """The connections that come from one address."""

    address: str
    guests: set[Guest] = field(default_factory=set)
    idle: OrderedDict[Guest, None] = field(default_factory=OrderedDict)
    """The connections without calls, the longest idle first."""


class Turns:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._line: list[tuple[float, int, Guest]] = []
        self._waited = 0
        self._reached_s = 0.0
        """The time used, by its price, at which the latest turn began that others waited for."""
        self.busy_s = 0.0
        """How long the turns since `_begin` took, or some earlier turns. The guests add to it."""
        self.asked = False
        """Whether the next iteration begins with `_begin`."""
        self.busy_since = inf
        """Bytes that are read now may have come after this moment. inf: the loop has rested, and they have
        come just now."""
        self._first_turn = inf
        """When the first turn since the loop last looked for bytes began."""

    def wait(self, guest: Guest) -> None:
        """Call the guest's `go_on` when its turn comes."""
        self._waited += 1
        heapq.heappush(self._line, (max(guest.used_s, self._reached_s), self._waited, guest))
        self._ask()

    def took(self, guest: Guest, *, began: float, now: float) -> None:
        """Count a turn. Short turns need not be counted while nobody waits: that is while `busy_s` is less
        than `AT_ONCE_S`, and `asked` is False.
        """
        if self._line:  # As long as nobody waits, nobody is owed time.
            price = len(guest.source.guests) * (1.0 if guest.urgent else _PRICE_OF_OTHERS)
            guest.used_s = max(guest.used_s, self._reached_s) + price * (now - began)
        self._first_turn = min(self._first_turn, began)
        self._ask()

    def _ask(self) -> None:
        if not self.asked:
            self.asked = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Serve the line at the beginning of an iteration. After that, the loop looks for bytes."""
        now = self._clock()
        self.asked, self.busy_s = False, 0.0
        self.busy_since = min(self._first_turn, now) if self._line else self._first_turn
        until = now + _LINE_S
        try:
            while self._line and now <= until:
                reached_s, _, guest = heapq.heappop(self._line)
                self._reached_s = max(self._reached_s, reached_s)
                guest.go_on()
                now = self._clock()
        finally:  # Even if a turn failed, the others have theirs.
            self._first_turn = inf
            if self._line or self.busy_since < inf:
                self._ask()
