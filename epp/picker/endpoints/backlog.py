"""The prompts that one server has yet to compute, as far as the picker knows (the B of the least-cost rule).

The server computes in order of arrival, so the backlog drains from the oldest booking at the server's prefill
rate, as an estimate between pages. The counters of a page then confirm what was really computed. The estimate
keeps only what the server cannot have counted yet: servers count a prompt when its prefill has finished, so
at most the oldest booking is computed and not counted.

The counter is that of first tokens (`begun`). Each first token ends one booking, even if more of the prompt
was cached than expected, or if its size was guessed wrong. If a server does not count them, the estimate is
used as it is (`settle`). A request that was computed and released between two pages is also in the counters
of the later page. The backlog remembers the request until that page. Otherwise the request would be counted a
second time, against requests that still wait.
"""

from collections import OrderedDict
from itertools import islice

from msgspec import Struct


class Booking(Struct, eq=False, gc=False):
    """Tokens of one request that its server has yet to compute."""

    tokens: int
    booked_at: float
    loads: bool = False
    """Whether an adapter has to be loaded for the request, as far as we know."""
    ahead_tokens: float = 0.0
    """Estimate of the tokens that the server had to compute before the request's first token, including the
    request's own tokens.
    """


class Backlog:
    """Bookings of one server, oldest first.

    Invariants: `tokens` is the sum of what the bookings still hold; 0 <= `drained_tokens` <= `tokens`;
    0 <= `unbegun`.
    """

    __slots__ = ("at", "bookings", "drained_tokens", "removed", "tokens", "unbegun")

    def __init__(self) -> None:
        self.bookings: OrderedDict[Booking, None] = OrderedDict()
        self.tokens = 0
        self.drained_tokens = 0.0
        self.unbegun = 0
        """The number of requests that were computed and released since the last scrape, and of probes."""
        self.removed: list[tuple[Booking, bool]] = []
        """Bookings that went with the last pages, and whether counters or the estimate show that they were
        computed. The picker takes them after each page."""
        self.at = 0.0

    @property
    def undone(self) -> tuple[float, float]:
        """Estimate of the tokens still to compute, and the time of this estimate. The tokens drain at the
        prefill rate from then on.
        """
        return self.tokens - self.drained_tokens, self.at

    @property
    def oldest(self) -> Booking | None:
        return next(iter(self.bookings), None)

    def undone_tokens(self, *, now: float, rate: float) -> float:
        """Return an estimate of the tokens still to compute, at `rate` tokens a second since the last
        event.
        """
        tokens, at = self.undone
        return max(0.0, tokens - rate * max(0.0, now - at))

    def book(self, booking: Booking, *, now: float, rate: float) -> None:
        """Add work. The server was idle before, so the time until now drains nothing of the new booking."""
        self.advance(now, rate)
        self.bookings[booking] = None
        self.tokens += booking.tokens
        booking.ahead_tokens = self.tokens - self.drained_tokens

    def release(self, booking: Booking, *, computed: bool, now: float, rate: float) -> None:
        """Remove what is left of the booking of a request that is over, or that is known to be computed.
        Idempotent.

        computed: the server did the work, so its counters will show it.
        """
        self.advance(now, rate)
        if booking in self.bookings:
            if computed:
                self.unbegun += 1
            else:
                self._unwait(booking)
            self._drop(booking)

    def clear_before(self, when: float, *, now: float, rate: float) -> None:
        """Remove bookings made before `when`: the server was idle then, or they were lost long ago."""
        self.advance(now, rate)
        while (oldest := self.oldest) and oldest.booked_at < when:
            self._remove(oldest, computed=False)

    def begun(self, requests: int, *, now: float, rate: float) -> tuple[int, float] | None:
        """Release the oldest bookings: since the last call the server's counters show first tokens of
        `requests` more. Returns the tokens of all these requests together, and their `ahead_tokens`. None:
        not all of the requests are known, or some of them had to wait for an adapter.
        """
        self.advance(now, rate)
        more = min(max(0, requests - self.unbegun), len(self.bookings))  # `islice` refuses a huge number
        ended = list(islice(self.bookings, more))
        known = len(ended) == requests and not any(booking.loads for booking in ended)
        tokens = sum([booking.tokens for booking in ended])
        for booking in ended:
            self._remove(booking, computed=True)
        self.unbegun = max(0, self.unbegun - requests)
        self.drained_tokens = min(self.drained_tokens, self.oldest.tokens if self.oldest else 0.0)
        return (tokens, sum([booking.ahead_tokens for booking in ended])) if known else None

    def settle(self, *, now: float, rate: float) -> None:
        """Take the drain estimate as true, since the server does not count first tokens. Bookings without
        tokens are removed too, because bookings of requests of unknown size would stay for ever.
        """
        self.advance(now, rate)
        left = int(self.drained_tokens)
        self.drained_tokens = 0.0
        self.unbegun = 0
        while (oldest := self.oldest) and oldest.tokens <= left:
            left -= oldest.tokens
            self._remove(oldest, computed=True)
        if oldest:
            oldest.tokens -= left
            self.tokens -= left

    def advance(self, now: float, rate: float) -> None:
        if now > self.at:
            drained = self.drained_tokens + rate * (now - self.at)
            self.drained_tokens = drained if drained < self.tokens else float(self.tokens)
            self.at = now

    def _remove(self, oldest: Booking, *, computed: bool) -> None:
        self.removed.append((oldest, computed))
        self._drop(oldest)

    def _drop(self, booking: Booking) -> None:
        if self.oldest is booking:  # the estimate counts against this booking first
            self.drained_tokens = max(0.0, self.drained_tokens - booking.tokens)
        del self.bookings[booking]
        self.tokens -= booking.tokens
        self.drained_tokens = min(self.drained_tokens, float(self.tokens))

    def _unwait(self, booking: Booking) -> None:
        """Take this request, which the server did not compute, out of what the last ones waited for."""
        for later in islice(reversed(self.bookings), 256):  # so that no release takes long
            if later is booking:
                return
            # Its tokens may seem to be done already, so they are not among those ahead.
            later.ahead_tokens = max(later.ahead_tokens - booking.tokens, later.tokens)
