"""The state of one endpoint as the picker knows it: from its source, from its metrics, and from the requests
that the picker sent there.

The load comes from scrapes, and is corrected by our own picks and ends since the scrape. Without metrics only
our own bookings are known. Only `Fleet`, the picker and `sharing` change this state, on one thread. A method
that changes what `Columns` shows notes the slot in `changed`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from math import inf

from msgspec import Struct

from epp.base.types import Endpoint, EndpointMetrics, ModelList
from epp.picker.endpoints.backlog import Backlog, Booking
from epp.picker.endpoints.learned import CounterWindow, computed_growth, growth
from epp.picker.endpoints.prefill_rate import PrefillRate

LONGEST_PREFILL_S = 600.0
"""No prefill takes longer. A booking this old was lost (its stream was let go). A longer predicted time is
wrong, and would keep a request for as long."""
PAGE_AGE_S = 0.1
"""A page may have been written this long before it was read."""


class Wait(Struct, eq=False, gc=False):
    """One request, from the time when it was sent to the end of its answer."""

    account: Account
    sent_at: float
    streams: bool
    begun_before: int
    """Answers of all servers that had begun."""
    began_at: float = inf


@dataclass(slots=True, eq=False)
class Account:
    """What the answers of one server said, to this picker alone. `answers` and `failures` keep it."""

    waits: set[Wait] = field(default_factory=set)
    """Requests that wait for their first byte, and that were not judged."""
    begun_at: float = -inf
    """When an answer of this server last began."""
    model: str = ""
    """The model of the last good answer, or of the first request. Empty: not known."""
    refused: int = 0
    """Requests that were refused (3xx, 4xx) since the last good answer."""
    noes: int = 0
    """Requests that ended without a token, while real answers to them would still go on."""
    no_tokens: int = 0
    """What the server was to compute for these requests."""
    no_token_at: float = -inf
    """When the last of these requests ended."""
    doubted: bool = True
    """Whether the next answer has to be read, as the first one has."""
    read_until: float = -inf
    """The allowance of reads is used up to this time: each read uses an eighth of a second."""
    streams_s: float = 0.0
    """From the beginning to the end of a streamed answer: an average."""
    bare: int = 0
    """Answers in a row, of those that were read, that lacked a token or their end."""
    bare_part: float = 1 / 6
    """The part of such answers among those that were read lately: an average. It starts at a value by which
    three in a row are not chance."""
    read_at: float = -inf
    """When an answer was last read that held a token."""
    uncounted_end_at: float = inf
    """When the first answer ended whose request was sent after the last page. Its tokens have to stand on the
    next page."""
    grew_at: float = -inf
    """When the server's page last showed more tokens or prompts than the page before it, or did not count
    them."""
    refuted_at: float = -inf
    """When a probe was last sent that got a token."""
    done: bool = False
    """Whether the server's counters have grown since the last request was sent there."""
    grew_or_idle_at: float = -inf
    """The time of the last page on which the counters had grown, or that came while no request was open."""
    most_kv_usage: float = 0.0
    """The largest KV usage on the pages since then."""
    stands_since: float | None = None
    """Since which page nothing has moved there, with requests open. None: none was open at the last page."""
    patience_s: float = 0.0
    """How long nothing may move. 0: something moved before the last page."""


@dataclass(slots=True, eq=False)
class EndpointState:
    """Everything that is known about one endpoint. Times are monotonic seconds."""

    endpoint: Endpoint
    rate: PrefillRate
    backlog: Backlog = field(default_factory=Backlog)
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
    computed_at: float = -inf
    """The time of the last page that counted more of them."""
    surplus: float | None = None
    """The largest number seen on a page of first tokens minus ended and present requests:
    see `_all_begun`."""
    predicted_tokens: int = 0
    """Prompt tokens that were computed here and believed to be cached."""
    window: CounterWindow = field(default_factory=CounterWindow)
    missed: int = 0
    """Requests in a row whose prefix was believed to be cached, while the server counted no hit."""
    process: int = 0
    """Number of processes seen under this name. Each starts with a cold cache."""
    cold_at: float = -inf
    """When the last of these processes was noticed. Earlier events say nothing about its cache."""
    adapters: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Adapters that the server served, by last use. At most as many as the server has slots."""
    expected_adapters: dict[str, int] = field(default_factory=dict)
    """Adapters that open requests ask for, with the number of these requests."""
    lost_request_at: float = -inf
    """When the server last ended the connection of a request that it had taken, without an answer."""
    gone: bool = False
    """Whether the endpoint has left the fleet. Its open requests then say nothing about the servers that
    stay."""
    slot: int = -1
    """Its slot in the fleet's columns. -1: it is not in the fleet."""
    listed: ModelList | None = None
    """The server's list at `/v1/models`, or the names on its metrics page. None: not known."""
    gives_no_list: bool = False
    """The server was asked for its list of models, and did not give it the last time."""
    account: Account = field(default_factory=Account)
    """What the answers of this process said. `FailingServers` starts another one for another process."""
    changed: set[int] = field(default_factory=set)
    """Every change here adds the slot to this set, for the columns."""

    @property
    def model(self) -> str:
        """The base model, as the source declares it, else as the server lists it. Empty: neither says."""
        return self.endpoint.model or (self.listed.base if self.listed is not None else "")

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of a prompt with its answer, by the server's list. None: it does not say."""
        return self.listed.max_model_len if self.listed is not None else None

    @property
    def tokens_per_s(self) -> float:
        """V: prompt tokens that the server computes in a second."""
        return self.rate.model.tokens_per_s / self.rate.slowness

    @property
    def loads(self) -> tuple[int, int]:
        """Return the requests in flight at the server, and those of them that are known to be open. The first
        number is that of the last scrape, plus picks and minus ends since then. It is never less than the
        second number.
        """
        known = self.in_flight + self.peers_in_flight
        inside = self.metrics.inside if self.metrics is not None else None
        if inside is None:
            return known, known
        return max(inside + self.picks_since_scrape - self.ends_since_scrape, known), known

    def scrape_failed(self, *, now: float) -> None:
        """Count a scrape that brought no page that could be read. Old bookings are removed, because bookings
        of streams that were let go must not pile up meanwhile.
        """
        self.changed.add(self.slot)
        self.failures += 1
        self.backlog.clear_before(now - LONGEST_PREFILL_S, now=now, rate=self.tokens_per_s)

    def book(self, booking: Booking, *, peers_at: float | None = None, now: float) -> None:
        """Book a request. peers_at: when another picker sent it, by our clock. None: this picker sends it."""
        self.changed.add(self.slot)
        if peers_at is None:
            self.in_flight += 1
        else:
            self.peers_in_flight += 1
        self.picks_since_scrape += self._unseen(peers_at)
        self.backlog.book(booking, now=now, rate=self.tokens_per_s)

    def release(self, booking: Booking, *, computed: bool, peers_at: float | None = None, now: float) -> None:
        """Release the booking of a request that is over. computed: its prefill is done, as far as we know.
        peers_at: when it ended, if another picker sent it.
        """
        self.detach(peers=peers_at is not None)
        self.ends_since_scrape += self._unseen(peers_at)
        self.backlog.release(booking, computed=computed, now=now, rate=self.tokens_per_s)

    def detach(self, *, peers: bool = False) -> None:
        """Stop counting a request that nobody follows any more while the answer continues. Scrapes count the
        request, and its booking drains. peers: another picker sent it.
        """
        self.changed.add(self.slot)
        if peers:
            self.peers_in_flight -= 1
        else:
            self.in_flight -= 1

    def _unseen(self, peers_at: float | None) -> bool:
        """Return whether the last scrape was before this event, as it is for each of our own. Events of other
        pickers come late, so the scrape may have counted one already.
        """
        return peers_at is None or self.metrics is None or peers_at > self.metrics.scraped_at

    def answered(self, booking: Booking, *, computed: bool, now: float) -> None:
        """Release the booking of an open request that has its whole answer. computed: the answer is no
        error.
        """
        self.changed.add(self.slot)
        self.backlog.release(booking, computed=computed, now=now, rate=self.tokens_per_s)

    # -- pages -----------------------------------------------------------------------------------------------

    def take_page(self, after: EndpointMetrics, *, now: float) -> None:
        """Take in the next page of the same process."""
        self.changed.add(self.slot)
        before, rate = self.metrics, self.tokens_per_s
        if before is not None:
            self._learn_busy(before, after)
        if after.ttft_count is None:
            self.backlog.settle(now=now, rate=rate)
        elif before is None:
            self.backlog.unbegun = 0  # the first counters of a server contain all that was released so far
        else:
            self._answers_begun(before, after, now=now)
        all_begun, done_before = self._all_begun(after), now - LONGEST_PREFILL_S
        # A page shows the server as of its last step, and the first step of a new request may take seconds.
        # Also, a request may be on its way to the server while the page is written. So only work that the
        # scrape before this one could have seen is known to be done, and none while the page does not change.
        if all_begun and before is not None and self.backlog.bookings:
            stands = after == replace(before, scraped_at=after.scraped_at)
            done_before = done_before if stands else before.scraped_at
        self.backlog.clear_before(done_before, now=now, rate=rate)
        if before is not None:
            oldest = self.backlog.oldest
            # Work from before the earlier page kept the server busy all the time, if no adapter is awaited.
            busy = oldest is not None and oldest.booked_at <= before.scraped_at and not oldest.loads
            self.rate.observe(before, after, busy=busy)
            if after.loaded_adapters is not None:
                # The server would name an adapter that was last used before the earlier page.
                known, since = after.known_adapters, before.scraped_at
                kept = [(name, at) for name, at in self.adapters.items() if at >= since or name in known]
                self.adapters = OrderedDict(kept)
        self.metrics = after
        self.failures = 0
        self.picks_since_scrape = 0
        self.ends_since_scrape = 0
        self.account.uncounted_end_at = inf

    def _answers_begun(self, before: EndpointMetrics, after: EndpointMetrics, *, now: float) -> None:
        """Release the requests whose first tokens came between two scrapes, and learn from their times."""
        requests = int(growth(before.ttft_count, after.ttft_count))
        first = self.backlog.begun(requests, now=now, rate=self.tokens_per_s)
        if first is not None:
            seconds = growth(before.ttft_sum_s, after.ttft_sum_s)
            self.rate.began(requests=requests, tokens=first[0], ahead_tokens=first[1], seconds=seconds)

    def _learn_busy(self, before: EndpointMetrics, after: EndpointMetrics) -> None:
        elapsed_s, computed = after.scraped_at - before.scraped_at, computed_growth(before, after)
        if computed:
            self.computed_at = after.scraped_at
        if after.scraped_at - self.computed_at > 120.0:
            self.computed_per_s = 0.0  # the average alone takes hours to become 0
        elif elapsed_s > 0:
            keep = 0.5 ** (elapsed_s / 20.0)
            self.computed_per_s = keep * self.computed_per_s + (1 - keep) * computed / elapsed_s

    def _all_begun(self, after: EndpointMetrics) -> bool:
        """Return whether every request at the server has its first token, as far as this page shows.

        First tokens minus ended requests are the requests that decode, except for a constant: requests
        that ended without a first token, and counts from before. If we subtract the requests at the
        server, the number is largest on pages without a request in prefill. So a page with the largest number
        seen so far shows no request in prefill. On a first page, our own requests may all be in prefill.
        """
        inside = after.inside
        if inside is None or after.ttft_count is None or after.finished is None:
            return inside == 0
        surplus = after.ttft_count - after.finished - inside
        if self.surplus is None:
            self.surplus = min(0.0, surplus + len(self.backlog.bookings))
        if inside == 0 or surplus > self.surplus:
            self.surplus = surplus
        return surplus == self.surplus

    # -- adapters --------------------------------------------------------------------------------------------

    @property
    def loaded_adapters(self) -> set[str]:
        """The LoRA adapters that the server holds, as far as the picker knows: those that it served, those
        that open requests ask for there, and those that its last page names.
        """
        known = self.metrics.known_adapters if self.metrics else frozenset()
        return {*self.adapters, *self.expected_adapters, *known}

    def has_adapter(self, adapter: str) -> bool:
        page = self.metrics
        return adapter in self.adapters or (page is not None and adapter in page.known_adapters)

    def expect_adapter(self, adapter: str) -> bool:
        """Remember that a request for `adapter` was sent to the server. Returns whether the adapter has to be
        loaded, as far as we know.
        """
        self.changed.add(self.slot)
        loads = adapter not in self.expected_adapters and not self.has_adapter(adapter)
        self.expected_adapters[adapter] = self.expected_adapters.get(adapter, 0) + 1
        return loads

    def settle_adapter(self, adapter: str) -> None:
        """Take in that the answer to such a request began, or that it will not begin."""
        self.changed.add(self.slot)
        self.expected_adapters[adapter] -= 1
        if not self.expected_adapters[adapter]:
            del self.expected_adapters[adapter]

    def use_adapter(self, adapter: str, *, most: int, now: float) -> bool:
        """Remember that the server holds `adapter` now. If it has no free slot, it drops the adapter that was
        unused for longest. most: the slots of a server that does not say. Returns whether the adapter was
        loaded for this, as far as we know.
        """
        self.changed.add(self.slot)
        loads = not self.has_adapter(adapter)
        self.adapters[adapter] = now
        self.adapters.move_to_end(adapter)
        while len(self.adapters) > ((self.metrics.max_lora if self.metrics else None) or most):
            self.adapters.popitem(last=False)
        return loads

    # -- other processes -------------------------------------------------------------------------------------

    def restarted(self, *, at: float) -> None:
        """Take in that another process has served since `at`, with a cold cache. If another picker saw the
        restart, the metrics stay until our own next scrape.
        """
        self.changed.add(self.slot)
        self.cold_at = at
        self.process += 1
        self.adapters.clear()
        self.expected_adapters.clear()

    def forget_server(self, *, now: float) -> None:
        """Forget metrics, adapters and backlog of the old process, because another process serves under this
        name.
        """
        self.restarted(at=now)
        self.metrics = None
        self.failures = 0
        self.computed_per_s = 0.0
        self.surplus = None
        self.missed = 0
        self.window = CounterWindow()
        self.backlog.clear_before(now, now=now, rate=self.tokens_per_s)
