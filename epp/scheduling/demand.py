"""Remembers when each prefix was last asked for, so that a rule can predict whether a further copy of the
prefix will be used.

A prefix is known here by the hash of the last chunk that any server held when a request came. Only the
picker's own requests count, from the moment in which they are booked. Owned by `ServerCaches`; synchronous,
with the time as an argument. The number of prefixes and the number of requests of each prefix are bounded.
The least recently used prefix is removed first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict

from epp.types import Entry

_MOST_PREFIXES = 4096
_MOST_REQUESTS = 32
"""The most requests that are kept for one prefix. If this many more are expected, the price of a copy is
nearly nothing.
"""


class Earlier:
    """The last requests for one prefix at this moment. Read it before the next request is booked."""

    __slots__ = ("_last", "_now", "_requests")

    def __init__(self, last: _Last, *, requests: int, now: float) -> None:
        self._last = last
        self._requests = requests
        self._now = now

    def between(self, least_s: float, most_s: float) -> tuple[int, int]:
        """Return two numbers: the requests for this prefix that came between `most_s` and `least_s` ago, and
        all requests, for any prefix, since the first of these.
        """
        times = self._last.times
        first = bisect_left(times, self._now - most_s)
        count = bisect_right(times, self._now - least_s) - first
        return (count, self._requests - self._last.numbers[first]) if count > 0 else (0, 0)


class _Last(Entry):
    """The last requests for one prefix, oldest first."""

    times: list[float]
    numbers: list[int]
    """For each of these, how many requests for any prefix came before."""


class Demand:
    __slots__ = ("_by_prefix", "_requests")

    def __init__(self) -> None:
        self._requests = 0
        self._by_prefix: OrderedDict[int, _Last] = OrderedDict()

    def asked(self, prefix: int, *, now: float) -> None:
        """Called when a request was booked. prefix: 0 if no server held a part of the prompt."""
        number = self._requests
        self._requests += 1
        if not prefix:
            return
        last = self._by_prefix.get(prefix)
        if last is None:
            last = self._by_prefix[prefix] = _Last([], [])
            if len(self._by_prefix) > _MOST_PREFIXES:
                self._by_prefix.popitem(last=False)
        else:
            self._by_prefix.move_to_end(prefix)
        last.times.append(now)
        last.numbers.append(number)
        if len(last.times) > _MOST_REQUESTS:
            del last.times[0], last.numbers[0]

    def earlier(self, prefix: int, *, now: float) -> Earlier | None:
        """Return the last requests for this prefix. None: there was none."""
        last = self._by_prefix.get(prefix)
        return Earlier(last, requests=self._requests, now=now) if last is not None else None

    def check_integrity(self) -> None:
        assert len(self._by_prefix) <= _MOST_PREFIXES
        for last in self._by_prefix.values():
            assert 0 < len(last.times) == len(last.numbers) <= _MOST_REQUESTS
            assert last.times == sorted(last.times)
