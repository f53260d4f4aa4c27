"""Remembers when requests were sent and when their answers began. While all servers are well, a fleet needs
no other facts about answers.

`Answers` finds requests whose first byte is overdue. `Failures` decides what follows from overdue first bytes
and from answers that fail. Pure: times are monotonic seconds. `Fleet` owns this object, and the picker
reports its own requests here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from epp.endpoints.state import EndpointState
from epp.types import EndpointMetrics, Entry

LONGEST_PREDICTED_S: Final = 600.0
"""Upper bound of the predicted time to a first token, since a server's own figures may be wrong. A request is
remembered until its first byte is overdue."""
_TYPICAL_STEP: Final = 0.05
_TIMES_TYPICAL: Final = 3.0
"""A first byte is overdue if it takes this many times as long as other first bytes."""
_OTHERS: Final = 3
"""An overdue answer is suspicious if other servers have sent this many answers since its request."""
_OVERDUE: Final = 2
"""A server counts as hanging after this many suspicious requests in a row."""
_SERVED_MODELS: Final = 256
"""The most pairs of a model and a path for which the last good answer is remembered."""


class Wait(Entry):
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


class Answers:
    """Knows which requests wait for their first byte, which servers seem to hang, and which servers answer
    well.

    A server is suspected if requests wait there for their first byte longer than others took, while other
    servers have answered requests since. The check runs only when a request is overdue, so it costs nothing
    while answers come.
    """

    def __init__(self) -> None:
        self.picks = 0
        """Requests sent so far."""
        self._served: OrderedDict[tuple[str, int], EndpointState] = OrderedDict()
        """The last server that answered for each model and path that was asked for lately."""
        self._waits: list[tuple[float, int, Wait]] = []
        """Waits as a heap, by the time when the answer is overdue."""
        self._overdue: dict[EndpointState, int] = {}
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
        """Record that a request was sent to a server that should need `predicted_s` to its first token.
        hang_seconds: the least time after which a first byte is overdue. 0: no first byte is ever overdue.

        An answer that comes whole takes as long as the server generates, so its first byte is never overdue
        if the server counts tokens as it generates them: `symptoms.Stalls` sees whether the counters grow.
        """
        self.picks += 1
        wait = Wait(state, now, streams, state.answers, self._answers - state.answers, model)
        if hang_seconds and (streams or not counts_answers(state.metrics)):
            patience_s = max(hang_seconds, _TIMES_TYPICAL * self._typical_s[streams])
            due_at = now + patience_s + min(2 * predicted_s, LONGEST_PREDICTED_S)
            heapq.heappush(self._waits, (due_at, self.picks, wait))
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

    def well(self, state: EndpointState, model: str, *, path_hash: int) -> None:
        """Record that a server answered well for a model, at this path."""
        self._served[model, path_hash] = state
        state.answered_model = model
        self._served.move_to_end((model, path_hash))
        while len(self._served) > _SERVED_MODELS:
            self._served.popitem(last=False)

    def another_serves(self, state: EndpointState, model: str, *, path_hash: int) -> bool:
        """Return whether the last good answer for the model at this path came from another server."""
        return self._served.get((model, path_hash), state) is not state

    def suspects(self, *, now: float) -> Sequence[Wait]:
        """Return the requests that became overdue since the last call, if this suggests that their servers
        hang. An answer that is not streamed may just be long, so the server of such a request has to be
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
        assert len(self._served) <= _SERVED_MODELS


def counts_answers(page: EndpointMetrics | None) -> bool:
    """Return whether the server counts the tokens of an answer while it generates them."""
    return page is not None and page.generated_tokens is not None and not page.counts_at_end
