"""Computes how late the calls of each Envoy are, even if Envoy's clock differs from ours.

A call's age includes the difference of the clocks and the time that other filters took. Both are the same for
all calls of an Envoy. So a call is late by the difference between its age and the age of the youngest recent
call. Pure: time is an argument. `over_grpcio` owns this object.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import Final

_WINDOW_S: Final = 120.0
"""Calls are compared with the youngest call of the last one to two windows of this length."""
_MOST_PEERS: Final = 1024
_MOST_S: Final = 60.0
"""A call that is older than this, or that came from as far in the future, says nothing."""


@dataclass(slots=True)
class _Youngest:
    since: float
    before_s: float = inf
    """The youngest age of the previous window."""
    now_s: float = inf


class CallAges:
    def __init__(self) -> None:
        self._by_peer: OrderedDict[str, _Youngest] = OrderedDict()

    def waited_s(self, peer: str, age_s: float, *, now: float) -> float:
        """Return how much older this call is than the youngest recent call of the same peer.

        peer: the connection. age_s: our wall clock minus the time at which Envoy began the request.
        """
        if not -_MOST_S < age_s < _MOST_S:
            return 0.0
        youngest = self._by_peer.get(peer)
        if youngest is None:
            youngest = self._by_peer[peer] = _Youngest(now)
            if len(self._by_peer) > _MOST_PEERS:
                self._by_peer.popitem(last=False)
        elif now - youngest.since > _WINDOW_S:
            youngest.since, youngest.before_s, youngest.now_s = now, youngest.now_s, inf
        youngest.now_s = min(youngest.now_s, age_s)
        return age_s - min(youngest.now_s, youngest.before_s)
