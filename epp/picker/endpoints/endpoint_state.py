"""The state of one endpoint as the picker knows it: from its source, from its metrics, and from the requests
that the picker sent there.

The load comes from scrapes, and is corrected by our own picks and ends since the scrape. Without fresh
metrics only our own bookings are known, and the type says so (`fresh` returns None). Only `Fleet`, the picker
and `sharing` change this state, on one thread.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from msgspec import Struct

from epp.base.types import Endpoint, EndpointMetrics, ModelList
from epp.picker.endpoints.learned import CounterWindow
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate

LONGEST_PREFILL_S = 600.0
"""No prefill takes longer. A booking this old was lost (its stream was let go). A longer predicted time is
wrong, and would keep a request for as long."""
PAGE_AGE_S = 0.1
"""A page may have been written this long before it was read."""
_TYPICAL_STEP = 0.05
_TIMES_TYPICAL = 3.0
"""A first byte is overdue if it takes this many times as long as other first bytes."""
_QUICK_S = 0.05
"""A streamed answer that ends this soon after its beginning may hold nothing but an error."""
LATELY_S = 1.0
"""For so long after a no, a session that the server refused stays away. Until then probes tell more. After an
answer with a token, no answer is read for this long on account of a quick end."""
MOST_ENDS = 64
"""The most ends of one server's answers that are remembered at a time."""
_SERVED_MODELS = 256
"""The most pairs of a model and a path for which the last good answer is remembered."""


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
    """Bookings of one server, oldest first: its undone prefill work in prompt tokens, the B of the least-cost
    rule.

    The server computes in order of arrival, so the backlog drains from the oldest booking at the server's
    prefill rate, as an estimate. The counters of each page correct it (`pages`).

    Invariants: `tokens` is the sum of what the bookings still hold; 0 <= `drained_tokens` <= `tokens`;
    0 <= `unbegun`.
    """

    __slots__ = ("at", "bookings", "counted", "drained_tokens", "tokens", "unbegun")

    def __init__(self, *, now: float) -> None:
        self.bookings: OrderedDict[Booking, None] = OrderedDict()
        self.tokens = 0
        self.drained_tokens = 0.0
        self.unbegun = 0
        """The number of requests that were computed and released since the last scrape."""
        self.counted: list[Booking] = []
        """Bookings that the last pages showed to be computed, or that were lost. The picker takes them after
        each page."""
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
                self.unbegun += 1
            else:
                self._unwait(booking)
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
        self.count(oldest)

    def count(self, booking: Booking) -> None:
        """Remove a booking, since a page shows that it is computed, or since it was lost."""
        self.counted.append(booking)
        self.drop(booking)

    def drop(self, booking: Booking) -> None:
        del self.bookings[booking]
        self.tokens -= booking.tokens
        booking.tokens = 0

    def _unwait(self, booking: Booking) -> None:
        """Let no later request have waited for this one, since the server did not compute it."""
        for later in reversed(self.bookings):
            if later is booking:
                return
            later.ahead_tokens -= booking.tokens

    def check_integrity(self) -> None:
        assert self.tokens == sum(b.tokens for b in self.bookings)
        assert 0 <= self.drained_tokens <= self.tokens
        assert all(b.tokens >= 0 for b in self.bookings)
        assert self.unbegun >= 0


@dataclass(slots=True, eq=False)
class EndpointState:
    """Everything that is known about one endpoint. Times are monotonic seconds."""

    endpoint: Endpoint
    backlog: Backlog
    rate: PrefillRate
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
    answers: int = 0
    """Answers that have begun, for requests of this picker."""
    overdue: int = 0
    """Suspicious requests of this picker in a row whose first bytes are overdue (`symptoms.suspects`)."""
    answered_model: str = ""
    """The model of the server's last good answer. Empty: not known."""
    lost_request_at: float = -inf
    """When the server last ended the connection of a request that it had taken, without an answer."""
    refused: int = 0
    """Requests of this picker that the server has refused (4xx) since its last good answer."""
    uncounted_end_at: float = inf
    """When the first answer ended whose request was sent after the last page. Its tokens have to stand on the
    next page."""
    doubted: bool = False
    """Whether the next answer has to be read, because one ended so soon that it may hold no token."""
    noes: int = 0
    """Requests that ended without a token, while real answers to them would still go on."""
    no_tokens: int = 0
    """What the server was to compute for these requests."""
    said_no_at: float = -inf
    """When the last of these requests ended."""
    read_at: float = -inf
    """When an answer was last read that held a token."""
    grew_at: float = -inf
    """When the server's page last showed more tokens or prompts than the page before it, or did not count
    them."""
    gone: bool = False
    """Whether the endpoint has left the fleet. Its open requests then say nothing about the servers that
    stay."""
    slot: int = -1
    """Its slot in the fleet's columns. -1: it is not in the fleet."""
    listed: ModelList | None = None
    """The server's list at `/v1/models`, or the names on its metrics page. None: not known."""
    gives_no_list: bool = False
    """The server was asked for its list of models, and did not give it the last time."""
    changed: set[int] = field(default_factory=set)
    """Every change here adds the slot to this set, for the columns."""

    @classmethod
    def new(cls, endpoint: Endpoint, *, model_rate: ModelRate, now: float) -> EndpointState:
        return cls(endpoint=endpoint, backlog=Backlog(now=now), rate=PrefillRate(model_rate))

    @property
    def model(self) -> str:
        """The base model, as the source declares it, else as the server lists it. Empty: neither says."""
        return self.endpoint.model or (self.listed.base if self.listed is not None else "")

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of a prompt with its answer, by the server's list. None: it does not say."""
        return self.listed.max_model_len if self.listed is not None else None

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
        number is that of the last scrape, plus picks and minus ends since then. It is never less than the
        second number.
        """
        known = self.in_flight + self.peers_in_flight
        inside = metrics.inside if metrics is not None else None
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
        self.computed_per_s = 0.0
        self.surplus = None
        self.missed = 0
        self.window = CounterWindow()
        self.backlog.clear_before(now, now=now, rate=self.tokens_per_s)


class Wait(Struct, eq=False, gc=False):
    """One request that waits for its first byte."""

    state: EndpointState
    sent_at: float
    streams: bool
    own_before: int
    """Number of answers of this server at the time when the request was sent."""
    others_before: int
    model: str
    """The model that the request asks for. Empty: not known."""
    over: bool = False
    """Whether the answer began, or the client no longer waits for it."""
    began_at: float = inf


class Answers:
    """Knows which requests wait for their first byte, and which servers answer well.

    While all servers are well, a fleet needs no other facts about answers. `symptoms` finds the servers that
    seem to hang, once a first byte is overdue. `failures` decides what follows.
    """

    def __init__(self) -> None:
        self.picks = 0
        """Requests sent so far."""
        self.begun = 0
        """Answers that have begun, by all servers."""
        self.waits: list[tuple[float, int, Wait]] = []
        """Waits as a heap, by the time when the answer is overdue."""
        self.served: OrderedDict[tuple[str, int], tuple[EndpointState, EndpointState]] = OrderedDict()
        """The last two servers that answered for each model and path that was asked for lately. The same one
        twice: no other has answered."""
        self._noes: list[tuple[float, int, EndpointState, int]] = []
        """Requests that ended without a token, as a heap by the time when a real answer would have ended.
        Each has a number of its own, and the tokens that its server was to compute."""
        self._noes_counted = 0
        self._last_no_at = -inf
        self._lasts_s = 1.0
        """From a request to the end of its answer, for answers that do not end at once."""
        self._typical_s = {True: 0.0, False: 0.0}
        """Time to the first byte, for answers that are streamed and for others."""

    def __len__(self) -> int:
        """Return the number of requests whose first byte may become overdue."""
        return len(self.waits)

    def sent(
        self,
        state: EndpointState,
        *,
        model: str,
        streams: bool,
        predicted_s: float,
        hang_seconds: float,
        now: float,
    ) -> Wait:
        """Record that a request was sent to a server that should need `predicted_s` to its first token.
        hang_seconds: the least time after which a first byte is overdue. 0: no first byte is ever overdue.

        An answer that comes whole takes as long as the server generates, so its first byte is never overdue
        if the server counts tokens as it generates them: `symptoms.Stalls` sees whether the counters grow.
        """
        self.picks += 1
        wait = Wait(state, now, streams, state.answers, self.begun - state.answers, model)
        if hang_seconds and (streams or not counts_answers(state.metrics)):
            patience_s = max(hang_seconds, _TIMES_TYPICAL * self._typical_s[streams])
            due_at = now + patience_s + min(2 * predicted_s, LONGEST_PREFILL_S)
            heapq.heappush(self.waits, (due_at, self.picks, wait))
        return wait

    def began(self, wait: Wait, *, well: bool, now: float) -> None:
        """Record that the first byte of an answer came. well: it is no error, and so shows how long an answer
        takes.
        """
        if wait.over:
            return
        wait.over, wait.began_at = True, now
        wait.state.answers += 1
        wait.state.overdue = 0
        self.begun += 1
        if well:
            typical = self._typical_s[wait.streams]
            self._typical_s[wait.streams] = typical + _TYPICAL_STEP * (now - wait.sent_at - typical)

    def well(self, state: EndpointState, model: str, *, path_hash: int) -> None:
        """Record that a server answered well for a model, at this path."""
        last = self.served.get((model, path_hash), (state, state))
        self.served[model, path_hash] = last if last[0] is state else (state, last[0])
        state.answered_model, state.refused = model, 0
        self.served.move_to_end((model, path_hash))
        while len(self.served) > _SERVED_MODELS:
            self.served.popitem(last=False)

    def ended(self, state: EndpointState, wait: Wait, *, now: float) -> bool:
        """Take in that a generated answer ended. It began well, and nobody has read it. If no page can have
        counted it yet, the next page should. If it ended very soon, the server's next answer is read. Return
        whether it ended so soon that it may hold no token.
        """
        page = state.metrics
        if page is not None and wait.sent_at > page.scraped_at:
            state.uncounted_end_at = min(state.uncounted_end_at, now)
        quick = wait.streams and now - wait.began_at < _QUICK_S
        if not quick:
            self._lasts_s += _TYPICAL_STEP * (now - wait.sent_at - self._lasts_s)
        doubtful = quick and now - state.read_at >= LATELY_S
        state.doubted = state.doubted or doubtful
        return doubtful

    def said_no(self, state: EndpointState, wait: Wait, *, tokens: int, now: float) -> None:
        """Record that an answer had no token. tokens: what its server was to compute.

        A server that refuses everything has no request in flight, so every rule that goes by load would send
        it most requests until its failure is proven. So the request still counts as one in flight until the
        time when an answer usually ends, and so do its tokens. This needs no verdict, so it also holds where
        the requests are at fault.
        """
        state.said_no_at = self._last_no_at = now
        state.changed.add(state.slot)
        if state.noes < MOST_ENDS:
            state.noes += 1
            state.no_tokens += tokens
            self._noes_counted += 1
            heapq.heappush(self._noes, (wait.sent_at + self._lasts_s, self._noes_counted, state, tokens))

    def noes(self, *, now: float) -> bool:
        """Forget requests to which a real answer would have ended. Return whether there are noes to count."""
        while self._noes and self._noes[0][0] <= now:
            _, _, state, tokens = heapq.heappop(self._noes)
            state.noes -= 1
            state.no_tokens -= tokens
            state.changed.add(state.slot)
        return bool(self._noes) or now - self._last_no_at < LATELY_S

    def overdue(self, *, now: float) -> bool:
        """Return whether a first byte may be overdue."""
        return bool(self.waits) and self.waits[0][0] <= now

    def check_integrity(self) -> None:
        assert len(self.served) <= _SERVED_MODELS
        assert all(0 < state.noes <= MOST_ENDS for _, _, state, _ in self._noes)


def counts_answers(page: EndpointMetrics | None) -> bool:
    """Return whether the server counts the tokens of an answer while it generates them."""
    return page is not None and page.generated_tokens is not None and not page.counts_at_end
