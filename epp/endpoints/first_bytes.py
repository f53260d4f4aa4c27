"""Requests that wait for their first byte, and which servers are suspected to hang because of them.

A server is suspected if requests wait there for their first byte longer than others took, while other servers
have answered requests since. This is checked only when a request is overdue, so the check costs nothing while
answers come. Pure: times are monotonic seconds. Owned by `failures`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from epp.endpoints.state import EndpointState
from epp.types import Entry

_TYPICAL_STEP: Final = 0.05
_LONGEST_FORETOLD_S: Final = 600.0
"""Upper bound of the predicted time to a first token. A request is remembered until its first byte is
overdue, and a server's wrong figures must not make that very late."""
_TIMES_TYPICAL: Final = 3.0
"""A first byte is overdue if it takes this many times as long as other first bytes."""
_OTHERS: Final = 3
"""Answers of other servers since a request was sent that make its own overdue answer suspicious."""
_OVERDUE: Final = 2
"""Suspicious requests in a row after which a server is taken to hang."""


class Wait(Entry):
    """One request that waits for its first byte."""

    state: EndpointState
    sent_at: float
    streams: bool
    own_before: int
    """Number of answers of this server at the time when the request was sent."""
    others_before: int
    over: bool = False
    """Whether the answer began, or nobody waits for it any more."""


class FirstBytes:
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
        """Requests whose first byte may become overdue."""
        return len(self._waits)

    def sent(
        self, state: EndpointState, *, streams: bool, foretold_s: float, hang_seconds: float, now: float
    ) -> Wait:
        """A request was sent to a server that should need `foretold_s` to its first token.
        hang_seconds: the least time after which a first byte is overdue; 0: it never is.

        An answer that comes whole takes as long as the server generates, so its first byte is never overdue
        if the server counts what it generates: `stalls` sees whether the counters grow.
        """
        wait = Wait(state, now, streams, state.answers, self._answers - state.answers)
        counts = state.metrics is not None and state.metrics.generated_tokens is not None
        if hang_seconds and (streams or not counts):
            patience_s = max(hang_seconds, _TIMES_TYPICAL * self._typical_s[streams])
            self._numbers += 1
            due_at = now + patience_s + min(2 * foretold_s, _LONGEST_FORETOLD_S)
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

    def suspects(self, *, now: float) -> Sequence[EndpointState]:
        """Servers whose requests became overdue since the last call, if this shows that they hang."""
        found = []
        while self._waits and self._waits[0][0] <= now:
            wait = heapq.heappop(self._waits)[2]
            if not wait.over and self._suspect(wait):
                found.append(wait.state)
        return found

    def forget(self, state: EndpointState) -> None:
        self._overdue.pop(state, None)

    def _suspect(self, wait: Wait) -> bool:
        """Whether this overdue answer, together with earlier ones, shows that its server hangs."""
        state = wait.state
        others = self._answers - state.answers - wait.others_before
        if state.gone or state.answers > wait.own_before or others < _OTHERS:
            return False
        overdue = self._overdue[state] = self._overdue.get(state, 0) + 1
        return overdue >= _OVERDUE

    def check_integrity(self) -> None:
        assert not any(state.gone for state in self._overdue), "a server that has left is kept"
