"""What the answers of the servers say, as far as it takes no verdict: which requests wait for their first
byte, which had no token, and which servers answer well.

`Answers` keeps the accounts of the servers right, and finds servers where requests wait while nothing moves.
`failures` decides what follows. Pure: times are monotonic seconds.
"""

from bisect import bisect, insort
from collections import OrderedDict
from math import inf
from operator import itemgetter
from typing import Literal

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.endpoint_state import LONGEST_PREFILL_S, Account, EndpointState, Wait
from epp.picker.endpoints.marks import STEP, Proof
from epp.picker.scheduling.snapshot import MOST_KEPT

LATELY_S = 1.0
"""For so long after a no, a session that the server refused stays away. Until then probes tell more. After an
answer with a token, no answer is read for this long on account of a quick end."""
MOST_ENDS = 64
"""The most ends of one server's answers that are remembered at a time."""
_QUICK_S = 0.05
"""A streamed answer that ends this soon after its beginning may hold nothing but an error. Where nothing
points to a failure, one answer of the fleet is read in this time."""
_OVERDUE = 2
"""A server is suspected if so many answers are overdue there, and others have sent so many meanwhile."""

Movement = Literal["moves", "idle", "hangs", "may hang", "stalls", "stalls alone"]
"""moves: the counters grew, or the page has none. idle: they did not, which says nothing yet. hangs: first
bytes of streamed answers do not come. may hang: other answers do not come. stalls: the counters stand still
although requests are open. alone: since then, something has moved at another server.
"""


class Answers:
    """Keeps the accounts of the servers right, and knows who answered well for which model and path."""

    def __init__(self) -> None:
        self._begun = 0
        """Answers that have begun."""
        self.served: OrderedDict[tuple[str, int], tuple[EndpointState, EndpointState]] = OrderedDict()
        """The last two servers that answered for each model and path that was asked for lately. The same one
        twice: no other has answered."""
        self._noes: list[tuple[float, EndpointState, Account, int]] = []
        """Requests that ended without a token, in the order of the times when real answers would have ended,
        each with the tokens that its server was to compute."""
        self._last_no_at = self._looked_at = -inf
        self._lasts_s = 1.0
        """From a request to the end of its answer, for answers that do not end at once."""
        self._typical_s = {True: 0.0, False: 0.0}
        """From a request to the first byte of its answer, for answers that are streamed and for others."""
        self._moved: list[tuple[EndpointState, float]] = []
        """The last two servers where something moved, and when. At least one of them is not the server in
        question."""

    def sent(self, state: EndpointState, *, model: str, streams: bool, now: float) -> Wait:
        """Record that a request was sent to a server."""
        account = state.account
        account.model = account.model or model
        wait = Wait(account, now, streams, self._begun)
        account.waits.add(wait)
        return wait

    def began(self, wait: Wait, *, well: bool, now: float) -> None:
        """Record that the first byte of an answer came. well: it is no error, and so shows how long an answer
        takes.
        """
        self.left(wait)
        self._begun += 1
        wait.account.begun_at = wait.began_at = now
        if well:
            typical = self._typical_s[wait.streams]
            self._typical_s[wait.streams] = typical + STEP * (now - wait.sent_at - typical)

    def left(self, wait: Wait) -> None:
        """Record that nobody waits for the first byte any more. May be called again."""
        wait.account.waits.discard(wait)

    def well(self, state: EndpointState, model: str, *, path_hash: int, proof: Proof, now: float) -> None:
        """Record that a server answered well for a model, at this path, as far as the proof goes."""
        if proof:  # not only its beginning
            state.account.read_at, state.account.bare = now, 0
            state.account.bare_part *= 1 - STEP / 4
        last = self.served.get((model, path_hash), (state, state))
        self.served[model, path_hash] = last if last[0] is state else (state, last[0])
        state.account.model, state.account.refused = model, 0
        self.served.move_to_end((model, path_hash))
        while len(self.served) > MOST_KEPT:
            self.served.popitem(last=False)

    def bare(self, state: EndpointState, other: EndpointState | None) -> None:
        """Record that an answer lacked a token or its end. The next one is read too, and that of another
        server, which shows how usual such answers are.
        """
        for each in (state, other or state):
            each.account.doubted = True
        state.account.bare = min(state.account.bare + 1, MOST_ENDS)
        state.account.bare_part += STEP / 4 * (1 - state.account.bare_part)

    def other_that_served(self, state: EndpointState, model: str, *, path_hash: int) -> EndpointState | None:
        """Return another server that has answered well for this model, at this path."""
        answered = self.served.get((model, path_hash), ())
        return next((other for other in answered if other is not state and not other.gone), None)

    def ended(self, state: EndpointState, wait: Wait, model: str, *, path_hash: int, now: float) -> bool:
        """Take in that a generated answer ended, which began well. If no page can have counted it yet, the
        next page should. If it ended very soon, if it was not streamed, or if the server's streams are much
        shorter than those of another server, the next answer is read: at most one of a server in `LATELY_S`,
        and one of all in `_QUICK_S`. Return whether it ended so soon that it may hold no token.
        """
        page, account = state.metrics, state.account
        if page is not None and wait.sent_at > page.scraped_at:
            account.uncounted_end_at = min(account.uncounted_end_at, now)
        quick = wait.streams and now - wait.began_at < _QUICK_S
        if not quick:
            self._lasts_s += STEP / 4 * (now - wait.sent_at - self._lasts_s)
        if wait.streams:
            account.streams_s += STEP * (now - wait.began_at - account.streams_s)
        if now - account.read_at < LATELY_S:
            return False
        if quick:
            account.doubted = True
        elif now - self._looked_at >= _QUICK_S:
            self._looked_at = now
            other = self.other_that_served(state, model, path_hash=path_hash)
            short = other is not None and 4 * account.streams_s < other.account.streams_s
            account.doubted = account.doubted or short or not wait.streams
        return quick

    def no_token(self, state: EndpointState, *, sent_at: float, tokens: int, now: float) -> None:
        """Record that an answer had no token, here or elsewhere. tokens: what its server was to compute.

        A server that refuses everything has no request in flight, so every rule that goes by load would send
        it most requests until its failure is proven. So the request still counts as one in flight until the
        time when an answer usually ends, and so do its tokens. This needs no verdict, so it also holds where
        the requests are at fault.
        """
        account = state.account
        account.no_token_at = self._last_no_at = now
        state.changed.add(state.slot)
        if account.noes < MOST_ENDS:
            account.noes += 1
            account.no_tokens += tokens
            insort(self._noes, (sent_at + self._lasts_s, state, account, tokens), key=itemgetter(0))

    def noes(self, *, now: float) -> bool:
        """Forget requests to which a real answer would have ended. Return whether there are noes to count."""
        over = bisect(self._noes, now, key=itemgetter(0)) if self._noes else 0
        for _, state, account, tokens in self._noes[:over]:
            account.noes -= 1
            account.no_tokens -= tokens
            state.changed.add(state.slot)
        del self._noes[:over]
        return bool(self._noes) or now - self._last_no_at < LATELY_S

    # -- servers where nothing moves -------------------------------------------------------------------------

    def look(
        self, state: EndpointState, after: EndpointMetrics | None, *, hang_seconds: float, now: float
    ) -> Movement:
        """Look at a server when its next page came, or could not be read (None).

        A server sends the headers of a streamed answer before it computes the first token. So a server whose
        engine stands still sends the first byte of every answer, and no more. Its metrics page shows this:
        requests of this picker are open there, and from one page to the next no token and no finished request
        was counted. If first bytes do not come, the answers themselves show it. A server that computes a very
        long prompt counts nothing for minutes, but its cache fills.
        """
        account, before, rate = state.account, state.metrics, state.tokens_per_s
        counts = counts_answers(after or before) and (before is None or counts_answers(before))
        undone_s = min(state.backlog.tokens / rate, LONGEST_PREFILL_S)
        grew = after is not None and (
            before is None
            or (_counters(before) != _counters(after) if counts else account.begun_at >= before.scraped_at)
        )
        fills = after is not None and _fills(state, after, grew=grew, now=now)
        # Pages are not read at exactly even times, so a little less than the whole time is enough.
        least_s = 0.8 * hang_seconds
        late = self._late(account, counts=counts, least_s=least_s, undone_s=undone_s, now=now)
        if hang_seconds and not fills and len(late) >= _OVERDUE:
            account.waits.difference_update(late)  # each request is judged once
            return "hangs" if sum(wait.streams for wait in late) >= _OVERDUE else "may hang"
        if after is None:
            return "idle"
        if grew:
            self._moved = [(state, now), *(one for one in self._moved if one[0] is not state)][:2]
        account.done = not state.picks_since_scrape and (grew or account.done)
        # The server has computed everything that was sent to it, so a client reads its answer slowly.
        read_slowly = after.inside == 0 and account.done
        if grew or fills or not counts or read_slowly or not state.in_flight or not hang_seconds:
            account.stands_since, account.patience_s = now if state.in_flight else None, 0.0
            return "moves" if grew or not counts else "idle"
        since = account.stands_since = now if account.stands_since is None else account.stands_since
        account.patience_s = account.patience_s or least_s + 2 * undone_s
        if now - since < account.patience_s:
            return "idle"
        alone = any(who is not state and at > since for who, at in self._moved)
        return "stalls alone" if alone else "stalls"

    def _late(
        self, account: Account, *, counts: bool, least_s: float, undone_s: float, now: float
    ) -> list[Wait]:
        """Return the requests whose first byte is overdue: it takes longer than others took and than the work
        there explains, and others have answered since, but not this server. An answer that comes whole takes
        as long as the server generates. If the server counts meanwhile, its counters tell more.
        """
        return [
            wait
            for wait in account.waits
            if (wait.streams or not counts)
            and now - wait.sent_at >= max(least_s, 3 * self._typical_s[wait.streams]) + 2 * undone_s
            and account.begun_at <= wait.sent_at
            and self._begun - wait.begun_before >= _OVERDUE
        ]


def counts_answers(page: EndpointMetrics | None) -> bool:
    """Return whether the server counts the tokens of an answer while it generates them."""
    return page is not None and page.generated_tokens is not None and not page.counts_at_end


def _fills(state: EndpointState, after: EndpointMetrics, *, grew: bool, now: float) -> bool:
    """Return whether more of the cache is in use than on any page since the counters grew, as while a long
    prompt is computed. Only a new maximum counts, and only for `LONGEST_PREFILL_S`, so that a sick server
    whose cache use goes up and down cannot hide.
    """
    account, kv_usage = state.account, after.kv_usage or 0.0
    if grew or not state.in_flight:
        account.grew_or_idle_at, account.most_kv_usage = now, kv_usage
    fills = kv_usage > account.most_kv_usage and now - account.grew_or_idle_at < LONGEST_PREFILL_S
    account.most_kv_usage = max(account.most_kv_usage, kv_usage)
    return fills


def _counters(page: EndpointMetrics) -> tuple[float | None, ...]:
    return page.generated_tokens, page.prompt_tokens, page.finished


def may_wait(state: EndpointState, *, stands: bool, now: float) -> bool:
    """Return whether a probe may have to wait in a queue, by the server's page or by the tokens that it still
    has to compute. stands: the counters stand still for longer than a queue explains.
    """
    page, rate = state.metrics, state.tokens_per_s
    waiting = page is not None and bool(page.waiting)
    if stands:  # counters that grow at an answer's end do not show that a queue moves
        return waiting and page is not None and page.counts_at_end
    return waiting or state.backlog.undone_tokens(now=now, rate=rate) > rate * 0.5
