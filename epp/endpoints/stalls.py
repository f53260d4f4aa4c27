"""Finds servers whose answers have begun and do not go on, by the servers' own counters.

A server sends the headers of a streamed answer before it computes the first token. So a server whose engine
stands still sends the first byte of every answer, and no more. Its metrics page shows this: requests of this
picker are open there, and from one page to the next no token and no finished request was counted. This is a
stall if it lasts longer than `hangSeconds` and longer than twice the time that the work booked there should
take.

Pure: times are monotonic seconds. Owned by `failures`, which passes each page in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from epp.endpoints.state import EndpointState
from epp.types import EndpointMetrics

_TIMES_FORETOLD: Final = 2.0
_LONGEST_FORETOLD_S: Final = 600.0

_PART_OF_PATIENCE: Final = 0.8
"""Pages are not read at exactly even times, so a little less than the whole time is enough."""

Seen = Literal["grew", "idle", "may stall", "stalls", "stalls alone"]
"""grew: the counters grew. idle: no request of this picker is open there. stalls alone: the counters of other
servers grew since this server stalled.
"""


@dataclass(slots=True)
class _Stall:
    since: float
    patience_s: float


class Stalls:
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
            rate = state.rate.tokens_per_s
            undone_s = state.backlog.undone_tokens(now=now, rate=rate) / rate
            patience_s = _PART_OF_PATIENCE * hang_seconds + _TIMES_FORETOLD * min(
                undone_s, _LONGEST_FORETOLD_S
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


def _grew(before: EndpointMetrics, after: EndpointMetrics) -> bool:
    """Whether the counters grew. A server that does not count answers' tokens is assumed to work."""
    if before.generated_tokens is None or after.generated_tokens is None:
        return True
    return (before.generated_tokens, before.prompt_tokens, before.finished) != (
        after.generated_tokens,
        after.prompt_tokens,
        after.finished,
    )
