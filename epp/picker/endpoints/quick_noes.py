"""Lets a server that answers without a token at once count as busy for as long as a real answer would take,
because a quick no is not an idle server.

A server that refuses everything has no request in flight, so every rule that goes by load would send it most
requests until its failure is proven. So a request that ended without a token still counts as one in flight
until the time when an answer usually ends, and so do its tokens. This needs no verdict, so it also holds
where the requests are at fault. It is no weapon either: a bad request takes no more of a server than a good
one would have taken, and no server counts as busier than the others by more than one request.

Pure: times are monotonic seconds. `Answers` owns this object, and `FailingServers.onto` reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from epp.picker.scheduling.snapshot import Floats, Snapshot

if TYPE_CHECKING:
    from epp.picker.endpoints.endpoint_state import EndpointState

_LATELY_S: Final = 1.0
"""For so long after a no, a session that the server refused stays away. Until then probes tell more."""
MOST_ENDS: Final = 64
"""The most ends of one server's answers that are remembered at a time."""


class _Noes(Struct, eq=False, gc=False):
    """One server's requests that ended without a token."""

    until: deque[float]
    """When the answer to each would have ended."""
    tokens: int = 0
    """What the server was to compute for the last one."""
    last_at: float = -inf
    """When the last one ended."""


class QuickNoes:
    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of: dict[EndpointState, _Noes] = {}
        """Empty while no request ended without a token. Then there is nothing to do for a pick."""

    def said(self, state: EndpointState, *, until: float, tokens: int, now: float) -> None:
        """Take in an answer without a token. until: when a real answer would have ended. tokens: what the
        server was to compute for the request.
        """
        if not state.gone:
            noes = self.of.setdefault(state, _Noes(deque(maxlen=MOST_ENDS)))
            noes.until.append(until)
            noes.tokens, noes.last_at = tokens, now

    def forget(self, state: EndpointState) -> None:
        self.of.pop(state, None)

    def onto(self, snapshot: Snapshot, places: Mapping[int, int], *, now: float) -> Snapshot:
        """Return the snapshot in which these requests count. places: the place of each candidate's slot."""
        said_no = np.zeros(len(snapshot), dtype=np.bool_)
        requests, tokens = np.zeros(len(snapshot)), np.zeros(len(snapshot))
        for state, noes in list(self.of.items()):
            lately = now - noes.last_at < _LATELY_S
            while noes.until and noes.until[0] <= now:
                noes.until.popleft()
            if not (noes.until or lately):
                del self.of[state]
            elif (place := places.get(state.slot)) is not None:
                said_no[place], requests[place] = lately, len(noes.until)
                tokens[place] = len(noes.until) * noes.tokens
        if len(snapshot) == 1:
            return snapshot
        return replace(
            snapshot,
            in_flight=_with(snapshot.in_flight, requests, more=1.0),
            undone_tokens=_with(snapshot.undone_tokens, tokens),
            said_no=said_no,
        )

    def check_integrity(self) -> None:
        assert not any(state.gone for state in self.of), "a server that has left is kept"


def _with(load: Floats, added: Floats, *, more: float = 0.0) -> Floats:
    """Return the load with what is added, but no more than `more` over the average of the others. What is
    added to the others does not count there: a server's warm prompts stay where no server has work.
    """
    of_others = (load.sum() - load) / (len(load) - 1)
    counted: Floats = np.maximum(load, np.minimum(load + added, of_others + more))
    return counted
