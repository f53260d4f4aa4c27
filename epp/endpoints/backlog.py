"""Undone prefill work at one server, in prompt tokens: the B of the least-cost rule.

Each pick books the tokens that the server will have to compute. The server computes in order of arrival, so
computed tokens are taken from the oldest booking first. Between scrapes the backlog drains at the server's
prefill rate, as an estimate. The counters of a scrape then confirm what was really computed. The estimate
keeps only what the server cannot have counted yet: servers count a prompt when its prefill has finished, so
at most the oldest booking is partly computed and not counted. If a scrape does not count this booking, a part
of it counts as not computed, whatever the estimate says, and drains from then on. The reason is that a long
prompt takes longer than its tokens suggest, and a server that wrongly seems idle would get the next prompt
too.

The best counter is that of first tokens (`begun`). Each first token ends one booking, even if more of the
prompt was cached than expected, or if its size was guessed wrong. If a server counts only tokens, these
tokens are subtracted (`confirm`). If it counts nothing, the estimate is used as it is (`settle`). A request
that was computed and released between two scrapes is also in the counters of the later scrape. It is
remembered until then. Otherwise it would be counted a second time, against requests that still wait.

Invariants: `_total` is the sum of what the bookings still hold; 0 <= `_drained` <= `_total`;
0 <= `_uncounted`, `_unbegun`.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from math import inf

from epp.types import Entry

_LEFT_OF_OLDEST = 0.25
"""Share of the oldest booking that counts as not computed if a scrape's counters do not show the booking."""


class Booking(Entry):
    """Tokens of one request that its server has yet to compute."""

    tokens: int
    booked_at: float
    loads: bool = False
    """Whether an adapter has to be loaded for the request, as far as we know."""
    ahead_tokens: float = 0.0
    """Estimate of the tokens that the server had to compute before the request's first token, its own
    included."""


class Backlog:
    """Bookings of one server, oldest first."""

    __slots__ = ("_at", "_bookings", "_drained", "_total", "_unbegun", "_uncounted")

    def __init__(self, *, now: float) -> None:
        self._bookings: OrderedDict[Booking, None] = OrderedDict()
        self._total = 0
        self._drained = 0.0
        self._uncounted = 0
        """Tokens that were computed and released since the last scrape. The next scrape's counters will
        contain them."""
        self._unbegun = 0
        """The number of these requests."""
        self._at = now

    def __len__(self) -> int:
        return len(self._bookings)

    @property
    def undone(self) -> tuple[float, float]:
        """Estimate of the tokens still to compute, and the time of this estimate. The tokens drain at the
        prefill rate from then on.
        """
        return self._total - self._drained, self._at

    @property
    def oldest_at(self) -> float:
        """When the oldest booking was made. Infinity: there is no booking."""
        oldest = next(iter(self._bookings), None)
        return oldest.booked_at if oldest is not None else inf

    def undone_tokens(self, *, now: float, rate: float) -> float:
        """Return an estimate of the tokens still to compute, at `rate` tokens a second since the last
        event.
        """
        tokens, at = self.undone
        return max(0.0, tokens - rate * max(0.0, now - at))

    def book(self, booking: Booking, *, now: float, rate: float) -> None:
        """Add work. The time before it was idle time, so it drains nothing of the new booking."""
        self._advance(now, rate)
        self._bookings[booking] = None
        self._total += booking.tokens
        booking.ahead_tokens = self._total - self._drained

    def release(self, booking: Booking, *, computed: bool, now: float, rate: float) -> None:
        """Called when the request is over, or is known to be computed: remove what is left of its booking.
        Idempotent.

        computed: the server did the work, so its counters will show it.
        """
        self._advance(now, rate)
        if booking in self._bookings:
            if computed:
                self._uncounted += booking.tokens
                self._unbegun += 1
            # The drain estimate counts against the oldest booking first, so it is removed with this booking.
            if next(iter(self._bookings)) is booking:
                self._drained = max(0.0, self._drained - booking.tokens)
            self._drop(booking)
            self._drained = min(self._drained, float(self._total))

    def begun(self, requests: int, *, now: float, rate: float) -> tuple[int, float] | None:
        """The server's counters show so many more first tokens than at the last call.

        Returns the tokens of all these requests together, and their `ahead_tokens`. None: not all of the
        requests are known, or some of them had to wait for an adapter.
        """
        self._advance(now, rate)
        more = min(max(0, requests - self._unbegun), len(self._bookings))  # `islice` takes no huge number
        begun = list(islice(self._bookings, more))
        known = len(begun) == requests and not any(booking.loads for booking in begun)
        tokens = sum([booking.tokens for booking in begun])
        for _ in begun:
            self._drop_oldest()
        self._unbegun = max(0, self._unbegun - requests)
        self._uncounted = 0
        self._keep_oldest_partly_undone()
        return (tokens, sum([booking.ahead_tokens for booking in begun])) if known else None

    def confirm(self, tokens: float, *, now: float, rate: float) -> None:
        """Called when the server's counters show that it computed `tokens` since the last call."""
        self._advance(now, rate)
        tokens = max(0.0, tokens - self._uncounted)
        self.baseline()
        self._drained = max(0.0, self._drained - tokens)
        self._take(tokens)
        self._keep_oldest_partly_undone()

    def baseline(self) -> None:
        """The first counters of a server already contain everything that was released until now."""
        self._uncounted = self._unbegun = 0

    def settle(self, *, now: float, rate: float) -> None:
        """Called when the server has no counters: take the drain estimate as true."""
        self._advance(now, rate)
        self._take(self._drained)
        self._drained = 0.0
        self.baseline()

    def clear_before(self, when: float, *, now: float, rate: float) -> None:
        """Remove bookings made before `when`: the server was idle then, or they were lost long ago."""
        self._advance(now, rate)
        while self._bookings:
            if next(iter(self._bookings)).booked_at >= when:
                break
            self._drop_oldest()
        self._drained = min(self._drained, float(self._total))

    def _advance(self, now: float, rate: float) -> None:
        if now > self._at:
            drained = self._drained + rate * (now - self._at)
            self._drained = drained if drained < self._total else float(self._total)
            self._at = now

    def _take(self, tokens: float) -> None:
        """Subtract tokens from the oldest bookings. Bookings without tokens are removed too: those of
        requests of unknown size would stay for ever.
        """
        left = int(tokens)
        while self._bookings:
            oldest = next(iter(self._bookings))
            if oldest.tokens > left:
                oldest.tokens -= left
                self._total -= left
                return
            left -= oldest.tokens
            self._drop(oldest)

    def _keep_oldest_partly_undone(self) -> None:
        oldest = next(iter(self._bookings), None)
        self._drained = min(self._drained, (1 - _LEFT_OF_OLDEST) * oldest.tokens if oldest else 0.0)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._bookings))
        self._drained = max(
            0.0, self._drained - oldest.tokens
        )  # the estimate counts against the oldest booking first
        self._drop(oldest)

    def _drop(self, booking: Booking) -> None:
        del self._bookings[booking]
        self._total -= booking.tokens
        booking.tokens = 0

    def check_integrity(self) -> None:
        assert self._total == sum(b.tokens for b in self._bookings)
        assert 0 <= self._drained <= self._total
        assert all(b.tokens >= 0 for b in self._bookings)
        assert self._uncounted >= 0
        assert self._unbegun >= 0
