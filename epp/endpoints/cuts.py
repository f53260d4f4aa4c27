"""For servers that have cut answers midway: which of their later answers were complete.

The beginning of an answer proves nothing about such a server. The end of an answer does, once Envoy's access
log has had the time to report a cut. Pure. Owned by `failures`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from epp.endpoints.state import EndpointState

_TOLD_S: Final = 1.0
"""Envoy reports a cut answer at most this long after its end, because it sends its log every 0.25 s."""
_MOST_ENDS: Final = 64
"""The most ends of one server that are remembered at a time. More are not needed to see that most answers are
complete.
"""


class Cuts:
    def __init__(self) -> None:
        self._ends: dict[EndpointState, deque[float]] = {}
        """When answers ended that may still turn out to be cut. Only servers that have cut
        answers are here.
        """

    def __contains__(self, state: EndpointState) -> bool:
        return state in self._ends

    def cut(self, state: EndpointState) -> None:
        """One of the ended answers was cut."""
        ends = self._ends.setdefault(state, deque())
        if ends:
            ends.popleft()

    def ended(self, state: EndpointState, *, now: float) -> None:
        """An answer that began well has ended."""
        ends = self._ends.get(state)
        # The oldest ends stay. If newer ends replaced them, none of a busy server's ends would ever be old
        # enough.
        if ends is not None and len(ends) < _MOST_ENDS:
            ends.append(now)

    def whole(self, *, now: float) -> Sequence[EndpointState]:
        """Yields the server of each answer that is now known to be complete."""
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
