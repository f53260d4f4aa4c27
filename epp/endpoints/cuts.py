"""For servers that have cut answers midway: which of their answers have ended whole since.

The beginning of an answer proves nothing of such a server. Its end does, once Envoy's access log has had the
time to say that the answer was cut. Pure. Owned by `failures`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from epp.endpoints.state import EndpointState

_TOLD_S: Final = 1.0
"""Envoy tells of a cut answer at most this long after its end: it sends its log every 0.25 s."""
_MOST_ENDS: Final = 64
"""Ends of one server that are remembered at a time. More are not needed to see that most answers are whole.
"""


class Cuts:
    def __init__(self) -> None:
        self._ends: dict[EndpointState, deque[float]] = {}
        """When answers ended that may yet turn out to be cut. Only of servers that have cut some."""

    def __contains__(self, state: EndpointState) -> bool:
        return state in self._ends

    def cut(self, state: EndpointState) -> None:
        """One of the answers that ended was cut."""
        ends = self._ends.setdefault(state, deque())
        if ends:
            ends.popleft()

    def ended(self, state: EndpointState, *, now: float) -> None:
        """An answer that began well is over."""
        ends = self._ends.get(state)
        # The oldest ones stay: pushed out by newer ones, none of a busy server would ever be old enough.
        if ends is not None and len(ends) < _MOST_ENDS:
            ends.append(now)

    def whole(self, *, now: float) -> Sequence[EndpointState]:
        """The server of each answer that was whole, as is known by now."""
        found = []
        for state, ends in self._ends.items():
            while ends and ends[0] <= now - _TOLD_S:
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
