"""The symptoms of a sick server that the status of its answers does not show. `Failures` owns one object of
each of these classes, and decides what follows.

- `FirstBytes`: requests wait for their first byte longer than others took, while other servers answer.
- `Stalls`: answers begin and do not go on, as far as the server's own counters tell.
- `Cuts`: answers break off midway.

Pure: times are monotonic seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from epp.endpoints.state import EndpointState
from epp.types import EndpointMetrics, Entry

_TYPICAL_STEP: Final = 0.05
_LONGEST_PREDICTED_S: Final = 600.0
"""Upper bound of the predicted time to a first token, since a server's own figures may be wrong. A request is
remembered until its first byte is overdue."""
_TIMES_TYPICAL: Final = 3.0
"""A first byte is overdue if it takes this many times as long as other first bytes."""
_OTHERS: Final = 3
"""An overdue answer is suspicious if other servers have sent this many answers since its request."""
_OVERDUE: Final = 2
"""Suspicious requests in a row after which a server counts as hanging."""

_TIMES_PREDICTED: Final = 2.0
_PART_OF_PATIENCE: Final = 0.8
"""Pages are not read at exactly even times, so a little less than the whole time is enough."""

Seen = Literal["grew", "idle", "may stall", "stalls", "stalls alone"]
"""grew: the counters grew. idle: no request of this picker is open there. stalls alone: since this server
stalled, the counters of other servers have grown.
"""

_REPORTED_S: Final = 1.0
"""Envoy reports a cut answer at most this long after its end, because it sends its log every 0.25 s."""
_MOST_ENDS: Final = 64
"""The most ends of one server that are remembered at a time. More are not needed to see that most answers are
complete.
"""


class Wait(Entry):
    """One request that waits for its first byte."""

    state: EndpointState
    sent_at: float
    streams: bool
    own_before: int
    """Number of answers of this server at the time when the request was sent."""
    others_before: int
    model: str
    """The model that it asks for. Empty: not known."""
    over: bool = False
    """Whether the answer began, or the client no longer waits for it."""


class FirstBytes:
    """Requests that wait for their first byte, and which servers are suspected to hang because of them.

    A server is suspected if requests wait there for their first byte longer than others took, while other
    servers have answered requests since. This is checked only when a request is overdue, so the check costs
    nothing while answers come.
    """

    def __init__(self) -> None:
        self._waits: list[tuple[float, int, Wait]] = []
        """A heap, by the time when the answer is overdue."""
        self._overdue: dict[EndpointState, int] = {}
        self._numbers = 0
        self._answers = 0
        """Answers by all servers."""
        self._typical_s = {True: 0.0, False: 0.0}
        """Time to the first byte, for answers that are streamed and for others."""

    def __len__(self) -> int:
        """Return the number of requests whose first byte may become overdue."""
        return len(self._waits)

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
        """Called when a request was sent to a server that should need `predicted_s` to its first token.
        hang_seconds: the least time after which a first byte is overdue; 0: it never is.

        An answer that comes whole takes as long as the server generates, so its first byte is never overdue
        if the server counts tokens as it generates them: `Stalls` sees whether the counters grow.
        """
        wait = Wait(state, now, streams, state.answers, self._answers - state.answers, model)
        if hang_seconds and (streams or not counts_answers(state.metrics)):
            patience_s = max(hang_seconds, _TIMES_TYPICAL * self._typical_s[streams])
            self._numbers += 1
            due_at = now + patience_s + min(2 * predicted_s, _LONGEST_PREDICTED_S)
            heapq.heappush(self._waits, (due_at, self._numbers, wait))
        return wait

    def began(self, wait: Wait, *, now: float) -> None:
        """Record that the first byte of an answer came."""
        if wait.over:
            return
        wait.over = True
        wait.state.answers += 1
        self._answers += 1
        self._overdue.pop(wait.state, None)
        typical = self._typical_s[wait.streams]
        self._typical_s[wait.streams] = typical + _TYPICAL_STEP * (now - wait.sent_at - typical)

    def suspects(self, *, now: float) -> Sequence[Wait]:
        """Return the requests that became overdue since the last call, if this suggests that their servers
        hang. An answer that is not streamed may just be long, so of such a request the server has to be
        asked.
        """
        found = []
        while self._waits and self._waits[0][0] <= now:
            wait = heapq.heappop(self._waits)[2]
            if not wait.over and self._suspect(wait):
                found.append(wait)
        return found

    def forget(self, state: EndpointState) -> None:
        self._overdue.pop(state, None)

    def _suspect(self, wait: Wait) -> bool:
        """Return whether this overdue answer, together with earlier ones, shows that its server hangs."""
        state = wait.state
        others = self._answers - state.answers - wait.others_before
        if state.gone or state.answers > wait.own_before or others < _OTHERS:
            return False
        overdue = self._overdue[state] = self._overdue.get(state, 0) + 1
        return overdue >= _OVERDUE

    def check_integrity(self) -> None:
        assert not any(state.gone for state in self._overdue), "a server that has left is kept"


@dataclass(slots=True)
class _Stall:
    since: float
    patience_s: float


class Stalls:
    """Finds servers whose answers have begun and do not go on, by the servers' own counters.

    A server sends the headers of a streamed answer before it computes the first token. So a server whose
    engine stands still sends the first byte of every answer, and no more. Its metrics page shows this:
    requests of this picker are open there, and from one page to the next no token and no finished request was
    counted. This is a stall if it lasts longer than `hangSeconds` and longer than twice the time that the
    work booked there should take.
    """

    def __init__(self) -> None:
        self._stalls: dict[EndpointState, _Stall] = {}
        self._went_on: list[tuple[EndpointState, float]] = []
        """The last two servers whose counters grew, and when. At least one of them is not the server in
        question."""
        self._in_use: set[EndpointState] = set()
        """Servers that had open requests at their last page."""
        self._done: set[EndpointState] = set()
        """Servers whose counters have grown since the last request was sent there."""

    def page(
        self,
        state: EndpointState,
        before: EndpointMetrics | None,
        after: EndpointMetrics,
        *,
        hang_seconds: float,
        now: float,
    ) -> Seen:
        """Take in a page. before: the page before it, by the same process."""
        grew = before is None or _grew(before, after)
        if grew:
            self._went_on = [(state, now), *(one for one in self._went_on if one[0] is not state)][:2]
        if state.picks_since_scrape:
            self._done.discard(state)
        elif grew:
            self._done.add(state)
        was_in_use = state in self._in_use
        (self._in_use.add if state.in_flight else self._in_use.discard)(state)
        read_slowly = (
            after.inside == 0 and state in self._done
        )  # it has computed everything that was sent there
        if before is None or grew or read_slowly or not state.in_flight or not hang_seconds:
            self._stalls.pop(state, None)
            return "grew" if grew else "idle"
        stall = self._stalls.get(state)
        if stall is None:
            rate = state.tokens_per_s
            undone_s = state.backlog.undone_tokens(now=now, rate=rate) / rate
            patience_s = _PART_OF_PATIENCE * hang_seconds + _TIMES_PREDICTED * min(
                undone_s, _LONGEST_PREDICTED_S
            )
            stall = self._stalls[state] = _Stall(before.scraped_at if was_in_use else now, patience_s)
        if now - stall.since < stall.patience_s:
            return "may stall"
        alone = any(who is not state and at > stall.since for who, at in self._went_on)
        return "stalls alone" if alone else "stalls"

    def forget(self, state: EndpointState) -> None:
        self._stalls.pop(state, None)
        self._in_use.discard(state)
        self._done.discard(state)
        self._went_on = [one for one in self._went_on if one[0] is not state]


def counts_answers(page: EndpointMetrics | None) -> bool:
    """Return whether the server counts the tokens of an answer while it generates them."""
    return page is not None and page.generated_tokens is not None and not page.counts_at_end


def _grew(before: EndpointMetrics, after: EndpointMetrics) -> bool:
    """Return whether the counters grew. A server that does not count answers' tokens while it generates
    them is assumed to work.
    """
    if not (counts_answers(before) and counts_answers(after)):
        return True
    return (before.generated_tokens, before.prompt_tokens, before.finished) != (
        after.generated_tokens,
        after.prompt_tokens,
        after.finished,
    )


class Cuts:
    """For servers that have cut answers midway: which of their later answers were complete.

    The beginning of an answer proves nothing about such a server. The end of an answer does, once Envoy's
    access log has had the time to report a cut.
    """

    def __init__(self) -> None:
        self._ends: dict[EndpointState, deque[float]] = {}
        """When answers ended that may still turn out to be cut. Only servers that have cut
        answers are here.
        """

    def __contains__(self, state: EndpointState) -> bool:
        return state in self._ends

    def cut(self, state: EndpointState) -> None:
        """Called when one of the ended answers was cut."""
        ends = self._ends.setdefault(state, deque())
        if ends:
            ends.popleft()

    def ended(self, state: EndpointState, *, now: float) -> None:
        """Called when an answer that began well has ended."""
        ends = self._ends.get(state)
        # The oldest ends stay. If newer ends replaced them, none of a busy server's ends would ever be old
        # enough.
        if ends is not None and len(ends) < _MOST_ENDS:
            ends.append(now)

    def whole(self, *, now: float) -> Sequence[EndpointState]:
        """Yields the server of each answer that is now known to be complete."""
        found = []
        for state, ends in self._ends.items():
            while ends and ends[0] <= now - _REPORTED_S:
                ends.popleft()
                found.append(state)
        return found

    def forget(self, state: EndpointState) -> None:
        self._ends.pop(state, None)

    def check_integrity(self) -> None:
        for state, ends in self._ends.items():
            assert not state.gone, "a server that has left is kept"
            assert len(ends) <= _MOST_ENDS
            assert list(ends) == sorted(ends)
