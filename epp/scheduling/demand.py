"""What the picker's own requests show about later ones: when each prefix was last asked for, and how many
requests come at once with the same prompt.

A request counts from the moment in which it is booked. Owned by `ServerCaches`; synchronous, with the time as
an argument. The number of prefixes, of requests of each prefix, and of groups is bounded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict

from epp.types import Entry

AT_ONCE_S = 0.1
"""Requests for one prefix that come within this time are probably of the same client, and do not predict
later requests."""
_MOST_GROUPS = 4096
_PRIOR_TOKENS = 10_000.0
"""The prior says that every request is alone, with the weight of this many tokens."""
_MOST_AT_ONCE = 16
"""Further requests of a group do not count. `expected` is one number for all clients, so one client must not
be able to set the price for all."""
_KEEP_TOKENS = 200_000.0
"""Older evidence is scaled down to this, so that a change of traffic shows within some hundred requests."""
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
    """Remembers when each prefix was last asked for, so that a rule can predict whether a further copy of the
    prefix will be used.

    A prefix is known here by the hash of the last chunk that any server held when a request came. The least
    recently used prefix is removed first.
    """

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


class _Group(Entry):
    came_at: float
    tokens: float
    """The fewest tokens that any server would have had to compute for the first request of the group."""
    requests: int = 0


class AtOnce:
    """How many requests come at once with the same prompt, as when a client asks for eight answers to one
    question. The first of them decides for all: the others find its prompt at the server that it went to.

    Requests are of one group if they have the same prompt and came within a tenth of a second. The size of a
    group is a mean over the tokens that groups have to compute, so prompts that are cached everywhere do not
    count, however often they come. The oldest group is removed first.
    """

    __slots__ = ("_computed_tokens", "_groups", "_wanted_tokens")

    def __init__(self) -> None:
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        """By prompt, oldest first."""
        self._computed_tokens = self._wanted_tokens = _PRIOR_TOKENS
        """The tokens of all groups: each counted once, and each counted for each of its requests."""

    def expected(self, prompt: int, *, now: float) -> float:
        """Return how many requests probably come at once with this one, which counts too. 1 for the later
        ones of a group, since its first one has decided. prompt: 0 if it has no full chunk.
        """
        group = self._groups.get(prompt)
        if not prompt or (group is not None and now - group.came_at <= AT_ONCE_S):
            return 1.0
        return self._wanted_tokens / self._computed_tokens

    def came(self, prompt: int, *, tokens: float, now: float) -> None:
        """Called when a request was booked. tokens: the fewest that any server has to compute for it."""
        groups = self._groups
        while groups and (len(groups) >= _MOST_GROUPS or self._oldest_at() < now - AT_ONCE_S):
            groups.popitem(last=False)
        if not prompt:
            return
        group = groups.get(prompt)
        if group is None:
            group = groups[prompt] = _Group(now, tokens)
            self._computed_tokens += tokens
        group.requests += 1
        if group.requests <= _MOST_AT_ONCE:
            self._wanted_tokens += group.tokens
        if self._computed_tokens > _KEEP_TOKENS:
            # In this order the two numbers stay equal where every request is alone.
            self._wanted_tokens = self._wanted_tokens * _KEEP_TOKENS / self._computed_tokens
            self._computed_tokens = _KEEP_TOKENS

    def _oldest_at(self) -> float:
        return next(iter(self._groups.values())).came_at

    def check_integrity(self) -> None:
        assert len(self._groups) <= _MOST_GROUPS
        assert 0 < self._computed_tokens <= self._wanted_tokens
        assert [group.came_at for group in self._groups.values()] == sorted(
            group.came_at for group in self._groups.values()
        )
