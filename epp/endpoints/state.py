"""The state of one endpoint as the picker knows it: from its source, from its metrics, and from the requests
that the picker sent there.

The load comes from scrapes, and is corrected by our own picks and ends since the scrape. Without fresh
metrics only our own bookings are known, and the type says so (`fresh` returns None). Only `Fleet`, the picker
and `sharing` change this state, on one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from epp.config.policy import PolicySpec
from epp.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.types import Endpoint, EndpointMetrics, Entry, ModelList, PromptSize

LOST_BOOKING_S = 600.0
"""A booking this old was lost (its stream was let go), since no prefill takes so long."""

_STALE_SHARE = 0.1
"""Share of the predicted tokens that count as the stalest."""
_STALE_STEP = 0.05


class Booking(Entry):
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
    """Bookings of one server, oldest first: its undone prefill work in prompt tokens, the B of the least-cost
    rule.

    The server computes in order of arrival, so the backlog drains from the oldest booking at the server's
    prefill rate, as an estimate. The counters of each page correct it (`pages`).

    Invariants: `tokens` is the sum of what the bookings still hold; 0 <= `drained_tokens` <= `tokens`;
    0 <= `uncounted_tokens`, `unbegun`.
    """

    __slots__ = ("at", "bookings", "drained_tokens", "tokens", "unbegun", "uncounted_tokens")

    def __init__(self, *, now: float) -> None:
        self.bookings: OrderedDict[Booking, None] = OrderedDict()
        self.tokens = 0
        self.drained_tokens = 0.0
        self.uncounted_tokens = 0
        """Tokens that were computed and released since the last scrape. The next scrape's counters will
        contain them."""
        self.unbegun = 0
        """The number of requests that were computed and released since the last scrape."""
        self.at = now

    @property
    def undone(self) -> tuple[float, float]:
        """Estimate of the tokens still to compute, and the time of this estimate. The tokens drain at the
        prefill rate from then on.
        """
        return self.tokens - self.drained_tokens, self.at

    @property
    def oldest_at(self) -> float:
        """When the oldest booking was made. Infinity: there is no booking."""
        oldest = next(iter(self.bookings), None)
        return oldest.booked_at if oldest is not None else inf

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
                self.uncounted_tokens += booking.tokens
                self.unbegun += 1
            # The drain estimate counts against the oldest booking first, so it is removed with this booking.
            if next(iter(self.bookings)) is booking:
                self.drained_tokens = max(0.0, self.drained_tokens - booking.tokens)
            self.drop(booking)
            self.drained_tokens = min(self.drained_tokens, float(self.tokens))

    def clear_before(self, when: float, *, now: float, rate: float) -> None:
        """Remove bookings made before `when`: the server was idle then, or they were lost long ago."""
        self.advance(now, rate)
        while self.oldest_at < when:
            self.drop_oldest()
        self.drained_tokens = min(self.drained_tokens, float(self.tokens))

    def advance(self, now: float, rate: float) -> None:
        if now > self.at:
            drained = self.drained_tokens + rate * (now - self.at)
            self.drained_tokens = drained if drained < self.tokens else float(self.tokens)
            self.at = now

    def drop_oldest(self) -> None:
        oldest = next(iter(self.bookings))
        # The estimate counts against the oldest booking first.
        self.drained_tokens = max(0.0, self.drained_tokens - oldest.tokens)
        self.drop(oldest)

    def drop(self, booking: Booking) -> None:
        del self.bookings[booking]
        self.tokens -= booking.tokens
        booking.tokens = 0

    def check_integrity(self) -> None:
        assert self.tokens == sum(b.tokens for b in self.bookings)
        assert 0 <= self.drained_tokens <= self.tokens
        assert all(b.tokens >= 0 for b in self.bookings)
        assert self.uncounted_tokens >= 0
        assert self.unbegun >= 0


@dataclass(slots=True, eq=False)
class CounterWindow:
    """Pairs our own finished requests with one server's counters, to learn the tokens of prompts without
    sampled answers (`learned.sample_of`).

    A window teaches only if the server finished as many requests as we sent there. Otherwise the requests of
    other clients or replicas would be taken for ours.
    """

    start: EndpointMetrics | None = None
    own: int = 0
    size: PromptSize = field(default_factory=lambda: PromptSize(0))

    def ended(self, size: PromptSize) -> None:
        self.own += 1
        whole = self.size
        self.size = PromptSize(
            whole.text_bytes + size.text_bytes,
            whole.continuation_bytes + size.continuation_bytes,
            whole.opaque + size.opaque,
        )


@dataclass(slots=True, eq=False)
class Staleness:
    """Decides which predictions count as stale, for all servers of a model. See `learned.CacheSize`."""

    unused_s: float = 30.0
    """A prefix that was unused for longer is stale. The value follows the quantile of predicted tokens."""
    typical_tokens: float = 0.0
    """Typical number of tokens in a prediction."""


@dataclass(slots=True, eq=False)
class HitWindow:
    """Predictions for one server since the last time that predictions and counters were compared."""

    opened_at: float | None = None
    hits_before: float = 0.0
    fresh_tokens: float = 0.0
    stale_tokens: float = 0.0
    other_tokens: float = 0.0
    """Prompt tokens that were not predicted to be cached."""
    requests: int = 0
    stale_requests: int = 0
    predicted_tokens: int = 0
    """All tokens predicted since the server is known. Only this total outlives the window."""

    def predicted(self, stale: Staleness, *, tokens: int, others: int, unused_s: float) -> None:
        """Count a request. `tokens` of its prompt are believed to be cached, in a prefix that was unused for
        `unused_s`. The other tokens are `others`.
        """
        self.requests += 1
        self.other_tokens += others
        if not tokens:
            return
        stale.typical_tokens += 0.05 * (tokens - stale.typical_tokens) if stale.typical_tokens else tokens
        weight = min(1.0, tokens / stale.typical_tokens) * _STALE_STEP
        self.predicted_tokens += tokens
        if unused_s > stale.unused_s:
            stale.unused_s *= 1 + weight * (1 - _STALE_SHARE)
            self.stale_tokens += tokens
            self.stale_requests += 1
        else:
            stale.unused_s = max(1e-3, stale.unused_s * (1 - weight * _STALE_SHARE))
            self.fresh_tokens += tokens


@dataclass(slots=True, eq=False)
class EndpointState:
    """Everything that is known about one endpoint. Times are monotonic seconds."""

    endpoint: Endpoint
    backlog: Backlog
    rate: PrefillRate
    window: CounterWindow = field(default_factory=CounterWindow)
    hits: HitWindow = field(default_factory=HitWindow)
    metrics: EndpointMetrics | None = None
    failures: int = 0
    """Number of scrapes that failed in a row."""
    in_flight: int = 0
    """Our own requests whose streams are open."""
    peers_in_flight: int = 0
    """Open requests at this server, as other pickers report them."""
    picks_since_scrape: int = 0
    ends_since_scrape: int = 0
    computed_per_s: float = 0.0
    """Prompt tokens that the server recently computed per second, by its own counters."""
    surplus: float | None = None
    """The largest number seen on a page of first tokens minus ended and present requests:
    see `pages`."""
    process: int = 0
    """Number of processes seen under this name. Each starts with a cold cache."""
    cold_at: float = -inf
    """When the last of these processes was noticed. Earlier events say nothing about its cache."""
    ended_loads: int = 0
    """Adapters loaded for requests that ended since the last scrape."""
    adapters: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Adapters that we sent to the server, by last use. At most as many as the server has slots."""
    answers: int = 0
    """Answers that have begun, for requests of this picker."""
    answered_model: str = ""
    """The model of the server's last good answer. Empty: not known."""
    gone: bool = False
    """Whether the endpoint has left the fleet. Its open requests then say nothing about the servers that
    stay."""
    slot: int = -1
    """Its slot in the fleet's columns. -1: it is not in the fleet."""
    listed: ModelList | None = None
    """The server's list at `/v1/models`. None: not known."""
    asked: bool = False
    """Whether the server was asked for this list, and answered or failed."""
    changed: set[int] = field(default_factory=set)
    """Every change here adds the slot to this set, for the columns."""

    @classmethod
    def new(cls, endpoint: Endpoint, *, model_rate: ModelRate, now: float) -> EndpointState:
        return cls(endpoint=endpoint, backlog=Backlog(now=now), rate=PrefillRate(model_rate))

    @property
    def model(self) -> str:
        """The base model, as the source declares it, else as the server lists it. Empty: neither says."""
        return self.endpoint.model or (self.listed.base if self.listed is not None else "")

    def fresh(self, *, now: float, stale_after_s: float) -> EndpointMetrics | None:
        """Return the last metrics. None: there are none, or they are too old."""
        metrics = self.metrics
        return metrics if metrics is not None and now - metrics.scraped_at <= stale_after_s else None

    @property
    def tokens_per_s(self) -> float:
        """V: prompt tokens that the server computes in a second."""
        return self.rate.model.tokens_per_s / self.rate.slowness

    @property
    def in_use(self) -> bool:
        """Whether a request was sent to the server that the server's last page may not show."""
        return self.in_flight > 0 or self.peers_in_flight > 0 or self.picks_since_scrape > 0

    def load(self, metrics: EndpointMetrics | None) -> int:
        """Return the requests in flight at the server."""
        return self.loads(metrics)[0]

    def loads(self, metrics: EndpointMetrics | None) -> tuple[int, int]:
        """Return the requests in flight at the server, and those of them that are known to be open. The first
        number is that of the last scrape, plus picks and minus ends since then, but at least the second one.
        """
        known = self.in_flight + self.peers_in_flight
        inside = metrics.inside if metrics is not None else None
        if inside is None:
            return known, known
        return max(inside + self.picks_since_scrape - self.ends_since_scrape, known), known

    def slots(self, *, spec: PolicySpec) -> int:
        """Return the number of adapters that the server can hold at once."""
        stated = self.metrics.max_lora if self.metrics else None
        return stated or spec.lora.slots_per_endpoint

    def has_adapter(self, adapter: str) -> bool:
        return adapter in self.adapters or (
            self.metrics is not None and adapter in self.metrics.known_adapters
        )

    def loaded_adapters(self) -> set[str]:
        return set(self.adapters) | (self.metrics.known_adapters if self.metrics else frozenset())

    def use_adapter(self, adapter: str, *, spec: PolicySpec, now: float) -> bool:
        """Remember that the server holds `adapter` now. If it has no free slot, it drops the adapter that was
        unused for longest. Returns whether the adapter has to be loaded, as far as we know.
        """
        self.changed.add(self.slot)
        loads = not self.has_adapter(adapter)
        self.adapters[adapter] = now
        self.adapters.move_to_end(adapter)
        while len(self.adapters) > self.slots(spec=spec):
            self.adapters.popitem(last=False)
        return loads

    def scrape_failed(self, *, now: float) -> None:
        """Count a scrape that brought no page that could be read. Old bookings are removed, because bookings
        of streams that were let go must not pile up meanwhile.
        """
        self.changed.add(self.slot)
        self.failures += 1
        self.backlog.clear_before(now - LOST_BOOKING_S, now=now, rate=self.tokens_per_s)

    def book(self, booking: Booking, *, now: float) -> None:
        self.changed.add(self.slot)
        self.in_flight += 1
        self.picks_since_scrape += 1
        self.backlog.book(booking, now=now, rate=self.tokens_per_s)

    def release(self, booking: Booking, *, computed: bool, now: float) -> None:
        """Release the booking of a request that is over. computed: its prefill is done, as far as we know."""
        self.changed.add(self.slot)
        self.in_flight -= 1
        self.ends_since_scrape += 1
        self.ended_loads += computed and booking.loads
        self.backlog.release(booking, computed=computed, now=now, rate=self.tokens_per_s)

    def detach(self) -> None:
        """Stop counting a request whose stream is let go while the answer continues. Scrapes count the
        request, and its booking drains.
        """
        self.changed.add(self.slot)
        self.in_flight -= 1

    def computed(self, booking: Booking, *, now: float) -> None:
        """Release the booking of a request whose prefill is done, as far as we know."""
        self.changed.add(self.slot)
        self.backlog.release(booking, computed=True, now=now, rate=self.tokens_per_s)

    def book_peers(self, booking: Booking, *, at: float, now: float) -> None:
        """Book a request that another picker sent to the server, at `at` by our clock."""
        self.changed.add(self.slot)
        self.peers_in_flight += 1
        if self._unseen(at):
            self.picks_since_scrape += 1
        self.backlog.book(booking, now=now, rate=self.tokens_per_s)

    def release_peers(self, booking: Booking, *, computed: bool, at: float, now: float) -> None:
        """Release the booking of another picker's request that is over, or whose picker is gone."""
        self.detach_peers(at=at)
        self.ended_loads += computed and booking.loads
        self.backlog.release(booking, computed=computed, now=now, rate=self.tokens_per_s)

    def detach_peers(self, *, at: float) -> None:
        """Stop counting a request that another picker no longer follows. The booking drains, and scrapes
        count the request.
        """
        self.changed.add(self.slot)
        self.peers_in_flight -= 1
        if self._unseen(at):
            self.ends_since_scrape += 1

    def _unseen(self, at: float) -> bool:
        """Return whether the last scrape was before `at`. Events of other pickers come late, so a scrape
        may have counted them already.
        """
        return self.metrics is None or at > self.metrics.scraped_at

    def restarted(self, *, at: float) -> None:
        """Take in that another process serves since `at`, with a cold cache. If another picker saw this, the
        metrics stay until our own next scrape.
        """
        self.changed.add(self.slot)
        self.cold_at = at
        self.process += 1
        self.adapters.clear()

    def forget_server(self, *, now: float) -> None:
        """Forget metrics, adapters and backlog of the old process, because another process serves under this
        name.
        """
        self.restarted(at=now)
        self.metrics = None
        self.computed_per_s = 0.0
        self.surplus = None
        self.window = CounterWindow()
        self.hits = HitWindow(predicted_tokens=self.hits.predicted_tokens)
        self.backlog.clear_before(now, now=now, rate=self.tokens_per_s)
