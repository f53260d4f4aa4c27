"""The state of one endpoint as the picker knows it: from its source, from its metrics, and from the requests
that the picker sent there.

The load comes from scrapes, and is corrected by our own picks and ends since the scrape. Without fresh
metrics only our own bookings are known, and the type says so (`fresh` returns None). Only `Fleet`, the picker
and `sharing` change this state, on one thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from epp.config.policy import PolicySpec
from epp.endpoints.backlog import Backlog, Booking
from epp.endpoints.growth import computed_growth, growth
from epp.endpoints.learned import CounterWindow, HitWindow
from epp.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.types import Endpoint, EndpointMetrics, ModelList

_BUSY_HALF_LIFE_S = 20.0
_LOST_BOOKING_S = 600.0
"""A booking this old was lost (its stream was let go), since no prefill takes so long."""


@dataclass(slots=True, eq=False)
class EndpointState:
    """Everything that is known about one endpoint. Times are monotonic seconds."""

    endpoint: Endpoint
    backlog: Backlog
    rate: PrefillRate
    window: CounterWindow
    hits: HitWindow = field(default_factory=HitWindow)
    metrics: EndpointMetrics | None = None
    failures: int = 0
    """Number of scrapes that failed in a row."""
    in_flight: int = 0
    """Our own requests whose streams are open."""
    peers_in_flight: int = 0
    """Requests that other pickers say they have open there."""
    picks_since_scrape: int = 0
    ends_since_scrape: int = 0
    computed_per_s: float = 0.0
    """Prompt tokens that the server recently computed per second, by its own counters."""
    surplus: float | None = None
    """The largest number seen on a page of first tokens minus ended and present requests:
    see `_all_begun`."""
    process: int = 0
    """Number of processes seen under this name. Each starts with a cold cache."""
    cold_at: float = -math.inf
    """When the last of these processes was noticed. Earlier events say nothing about its cache."""
    ended_loads: int = 0
    """Adapters loaded for requests that ended since the last scrape."""
    adapters: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Adapters that we sent to the server, by last use; at most as many as it has slots."""
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
    """What the server lists at `/v1/models`. None: not known."""
    asked: bool = False
    """Whether the server was asked for this list, and answered or failed."""
    changed: set[int] = field(default_factory=set)
    """Every change here adds the slot to this set, for the columns."""

    @classmethod
    def new(cls, endpoint: Endpoint, *, model_rate: ModelRate, now: float) -> EndpointState:
        return cls(
            endpoint=endpoint,
            backlog=Backlog(now=now),
            rate=PrefillRate(model_rate),
            window=CounterWindow(),
        )

    @property
    def model(self) -> str:
        """The base model, as the source declares it, else as the server lists it. Empty: neither says."""
        return self.endpoint.model or (self.listed.base if self.listed is not None else "")

    def fresh(self, *, now: float, stale_after_s: float) -> EndpointMetrics | None:
        """Return the last metrics. None: there are none, or they are too old."""
        metrics = self.metrics
        return metrics if metrics is not None and now - metrics.scraped_at <= stale_after_s else None

    @property
    def known_load(self) -> int:
        """Requests that this picker and the others have open at the server."""
        return self.in_flight + self.peers_in_flight

    @property
    def in_use(self) -> bool:
        """Whether anything was sent to the server that its last page may not show."""
        return self.known_load > 0 or self.picks_since_scrape > 0

    def load(self, metrics: EndpointMetrics | None) -> int:
        """Return the requests in flight at the server: by the last scrape, plus picks and minus ends since
        then, but at least the requests that are known to be open.
        """
        return self.loads(metrics)[0]

    def loads(self, metrics: EndpointMetrics | None) -> tuple[int, int]:
        known = self.in_flight + self.peers_in_flight
        inside = metrics.inside if metrics is not None else None
        if inside is None:
            return known, known
        scraped = inside + self.picks_since_scrape - self.ends_since_scrape
        scraped = max(scraped, known)
        return scraped, known

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

    def observe(self, after: EndpointMetrics, *, now: float) -> None:
        self.changed.add(self.slot)
        before, rate = self.metrics, self.rate.tokens_per_s
        if before is not None:
            self.rate.observe(before, after, adapter_loads=self.ended_loads)
            self._learn_busy(before, after)
        if after.ttft_count is None and after.prompt_tokens is None:
            self.backlog.settle(now=now, rate=rate)
        elif before is None:
            self.backlog.baseline()
        elif after.ttft_count is not None:
            self._begun(before, after, now=now)
        else:
            self.backlog.confirm(computed_growth(before, after), now=now, rate=rate)
        # A request may be on its way to the server while the page is written. So only work that the scrape
        # before this one could have seen is known to be done.
        all_begun = self._all_begun(after)
        done_before = before.scraped_at if all_begun and before is not None else now - _LOST_BOOKING_S
        self.backlog.clear_before(done_before, now=now, rate=rate)
        if before is not None:
            # Bookings from before the earlier page that are not done yet kept the server busy all the time.
            self.rate.worked(before, after, busy=self.backlog.oldest_at <= before.scraped_at)
        if before is not None and after.loaded_adapters is not None:
            self._forget_unloaded(after.known_adapters, before=before.scraped_at)
        self.metrics = after
        self.failures = 0
        self.picks_since_scrape = 0
        self.ends_since_scrape = 0
        self.ended_loads = 0

    def _begun(self, before: EndpointMetrics, after: EndpointMetrics, *, now: float) -> None:
        """Release the requests whose first tokens came between two scrapes, and learn from their times."""
        requests = int(growth(before.ttft_count, after.ttft_count))
        begun = self.backlog.begun(requests, now=now, rate=self.rate.tokens_per_s)
        if begun is not None:
            seconds = growth(before.ttft_sum_s, after.ttft_sum_s)
            self.rate.began(requests=requests, tokens=begun[0], ahead_tokens=begun[1], seconds=seconds)

    def _learn_busy(self, before: EndpointMetrics, after: EndpointMetrics) -> None:
        elapsed_s = after.scraped_at - before.scraped_at
        if elapsed_s > 0:
            keep = 0.5 ** (elapsed_s / _BUSY_HALF_LIFE_S)
            computed = computed_growth(before, after) / elapsed_s
            self.computed_per_s = keep * self.computed_per_s + (1 - keep) * computed

    def _forget_unloaded(self, known: AbstractSet[str], *, before: float) -> None:
        """Forget adapters that the server does not name, if they were last used before this time. The server
        would name them if it still held them.
        """
        for adapter in [a for a, used_at in self.adapters.items() if used_at < before and a not in known]:
            del self.adapters[adapter]

    def _all_begun(self, after: EndpointMetrics) -> bool:
        """Return whether every request at the server has its first token, as far as this page shows.

        First tokens minus ended requests are the requests that decode, except for a constant: requests
        that ended without a first token, and counts from before. If we subtract the requests at the
        server, the number is largest on pages without a request in prefill. So a page with the largest
        number seen so far has none.
        """
        inside = after.inside
        if inside is None or after.ttft_count is None or after.finished is None:
            return inside == 0
        surplus = after.ttft_count - after.finished - inside
        if inside == 0 or self.surplus is None or surplus > self.surplus:
            self.surplus = surplus
        return surplus == self.surplus

    def scrape_failed(self, *, now: float) -> None:
        """Called when the scrape brought no page that could be read. Bookings of streams that were let go
        must not pile up meanwhile.
        """
        self.changed.add(self.slot)
        self.failures += 1
        self.backlog.clear_before(now - _LOST_BOOKING_S, now=now, rate=self.rate.tokens_per_s)

    def book(self, booking: Booking, *, now: float) -> None:
        self.changed.add(self.slot)
        self.in_flight += 1
        self.picks_since_scrape += 1
        self.backlog.book(booking, now=now, rate=self.rate.tokens_per_s)

    def release(self, booking: Booking, *, computed: bool, now: float) -> None:
        """Called when the request is over. computed: the server did its prefill, as far as we know."""
        self.changed.add(self.slot)
        self.in_flight -= 1
        self.ends_since_scrape += 1
        self.ended_loads += computed and booking.loads
        self.backlog.release(booking, computed=computed, now=now, rate=self.rate.tokens_per_s)

    def detach(self) -> None:
        """Called when the stream is let go while the answer continues. Scrapes count it, and its booking
        drains.
        """
        self.changed.add(self.slot)
        self.in_flight -= 1

    def computed(self, booking: Booking, *, now: float) -> None:
        """Called when the prefill of the request is done, as far as we know."""
        self.changed.add(self.slot)
        self.backlog.release(booking, computed=True, now=now, rate=self.rate.tokens_per_s)

    def book_peers(self, booking: Booking, *, at: float, now: float) -> None:
        """Another picker sent a request to the server, at `at` by our clock."""
        self.changed.add(self.slot)
        self.peers_in_flight += 1
        if self._unseen(at):
            self.picks_since_scrape += 1
        self.backlog.book(booking, now=now, rate=self.rate.tokens_per_s)

    def release_peers(self, booking: Booking, *, computed: bool, at: float, now: float) -> None:
        """Called when a request of another picker is over, or that picker is gone."""
        self.changed.add(self.slot)
        self.detach_peers(at=at)
        self.ended_loads += computed and booking.loads
        self.backlog.release(booking, computed=computed, now=now, rate=self.rate.tokens_per_s)

    def detach_peers(self, *, at: float) -> None:
        """Another picker no longer follows its request. The booking drains, and scrapes count the request."""
        self.changed.add(self.slot)
        self.peers_in_flight -= 1
        if self._unseen(at):
            self.ends_since_scrape += 1

    def _unseen(self, at: float) -> bool:
        """Return whether the last scrape was before `at`. Events of other pickers come late, so a scrape
        may have counted them already.
        """
        return self.metrics is None or at > self.metrics.scraped_at

    def on_peer_restart(self, *, at: float) -> None:
        """Another picker saw the server restart. The server's metrics stay until our own next scrape."""
        self.changed.add(self.slot)
        self.cold_at = at
        self.process += 1
        self.adapters.clear()

    def forget_server(self, *, now: float) -> None:
        """Another process serves under this name, so forget metrics, adapters and backlog of the old one."""
        self.changed.add(self.slot)
        self.process += 1
        self.cold_at = now
        self.metrics = None
        self.computed_per_s = 0.0
        self.adapters.clear()
        self.surplus = None
        self.window = CounterWindow()
        self.hits = HitWindow(predicted_tokens=self.hits.predicted_tokens)
        self.backlog.clear_before(now, now=now, rate=self.rate.tokens_per_s)
