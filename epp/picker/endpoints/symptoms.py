"""Finds symptoms of a sick server that its answers do not show. `FailingServers` decides what follows.

- `suspects`: the first bytes of answers are overdue.
- `Stalls`: answers begin and do not go on, as far as the server's own counters tell.

Pure: times are monotonic seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.endpoint_state import (
    LONGEST_PREFILL_S,
    Answers,
    EndpointState,
    Wait,
    counts_answers,
)

_OTHERS: Final = 3
"""An overdue answer is suspicious if other servers have sent this many answers since its request."""
_OVERDUE: Final = 2
"""A server counts as hanging after this many suspicious requests in a row."""
_TIMES_PREDICTED: Final = 2.0
_PART_OF_PATIENCE: Final = 0.8
"""Pages are not read at exactly even times, so a little less than the whole time is enough."""

Seen = Literal["grew", "idle", "may stall", "stalls", "stalls alone"]
"""grew: the counters grew. idle: no request of this picker is open there. stalls alone: since this server
stalled, the counters of other servers have grown.
"""


def suspects(answers: Answers, *, now: float) -> Sequence[Wait]:
    """Return the requests that became overdue since the last call, if this suggests that their servers hang.
    An answer that is not streamed may just be long, so the server of such a request has to be asked.

    A server is suspected if requests wait there for their first byte longer than others took, while other
    servers have answered requests since. The check runs only when a request is overdue, so it costs nothing
    while answers come.
    """
    found = []
    while answers.overdue(now=now):
        wait = heapq.heappop(answers.waits)[2]
        if not wait.over and _suspicious(wait, others=answers.begun - wait.state.answers):
            found.append(wait)
    return found


def _suspicious(wait: Wait, *, others: int) -> bool:
    """Return whether this overdue answer, together with earlier ones, shows that its server hangs.
    others: the answers of all other servers so far.
    """
    state = wait.state
    if state.gone or state.answers > wait.own_before or others - wait.others_before < _OTHERS:
        return False
    state.overdue += 1
    return state.overdue >= _OVERDUE


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
        if state.in_flight:
            self._in_use.add(state)
        else:
            self._in_use.discard(state)
        # The server has computed everything that was sent to it, so a client reads its answer slowly.
        read_slowly = after.inside == 0 and state in self._done
        if before is None or grew or read_slowly or not state.in_flight or not hang_seconds:
            self._stalls.pop(state, None)
            return "grew" if grew else "idle"
        stall = self._stalls.get(state)
        if stall is None:
            rate = state.tokens_per_s
            undone_s = state.backlog.undone_tokens(now=now, rate=rate) / rate
            patience_s = _PART_OF_PATIENCE * hang_seconds + _TIMES_PREDICTED * min(
                undone_s, LONGEST_PREFILL_S
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

    def check_integrity(self) -> None:
        kept = [*self._stalls, *self._in_use, *self._done, *(state for state, _ in self._went_on)]
        assert not any(state.gone for state in kept), "a server that has left is kept"
        assert len(self._went_on) <= 2


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
