"""When each prefix was last asked for, so that a rule can tell whether a further copy of the prefix will be
used.

A prefix is known here by the hash of the last chunk that any server held when a request came. The picker's
own requests count, in the moment in which they are booked. Owned by `ServerCaches`; synchronous, with the
time as an argument. Bounded: so many prefixes, the least recently used one goes first, and so many requests
of each.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

_MOST_PREFIXES = 4096
_MOST_REQUESTS = 32
"""Requests that are kept of one prefix. With this many to come, the price of a copy is nearly nothing."""


class Earlier(NamedTuple):
    """An earlier request for the same prefix."""

    ago_s: float
    since: int
    """The number of requests that came from then on, for any prefix, this one included."""


class Demand:
    __slots__ = ("_by_prefix", "_requests")

    def __init__(self) -> None:
        self._requests = 0
        self._by_prefix: OrderedDict[int, deque[tuple[float, int]]] = OrderedDict()
        """The last requests of each prefix, oldest first: when each came, and how many came before it."""

    def asked(self, prefix: int, *, now: float) -> None:
        """A request was booked. prefix: 0 if no server held a part of the prompt."""
        number = self._requests
        self._requests += 1
        if not prefix:
            return
        last = self._by_prefix.get(prefix)
        if last is None:
            last = self._by_prefix[prefix] = deque(maxlen=_MOST_REQUESTS)
            if len(self._by_prefix) > _MOST_PREFIXES:
                self._by_prefix.popitem(last=False)
        else:
            self._by_prefix.move_to_end(prefix)
        last.append((now, number))

    def earlier(self, prefix: int, *, now: float) -> Sequence[Earlier]:
        """The last requests for this prefix, the earliest first."""
        return [Earlier(now - at, self._requests - number) for at, number in self._by_prefix.get(prefix, ())]

    def check_integrity(self) -> None:
        assert len(self._by_prefix) <= _MOST_PREFIXES
        assert all(0 < len(last) <= _MOST_REQUESTS for last in self._by_prefix.values())
