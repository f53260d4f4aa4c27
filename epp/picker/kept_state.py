"""Remembers which server keeps what a request names by an id: a stored response, conversation, file or batch.

The answer that made the object has its id. Other pickers of the pool are told (`sharing`). Ids are known by a
keyed hash, and forgotten after a day, when there are too many, or when the server has restarted. Pure: times
are monotonic seconds. `picker` owns this object.
"""

from __future__ import annotations

from typing import Final

from epp.base.types import EndpointName
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet

_KEPT_S: Final = 86_400.0
_MOST: Final = 65_536


class KeptState:
    """Hashes of ids, the longest known first."""

    def __init__(self) -> None:
        self._holders: dict[int, tuple[EndpointName, float]] = {}

    def remember(self, id_hash: int, server: EndpointName, *, now: float) -> None:
        """Take in that this server has made the object with this id."""
        self._holders.pop(id_hash, None)
        self._holders[id_hash] = (server, now)
        oldest = next(iter(self._holders))
        if len(self._holders) > _MOST or now - self._holders[oldest][1] > _KEPT_S:
            del self._holders[oldest]

    def holder(self, id_hash: int, fleet: Fleet, *, now: float) -> EndpointState | None:
        """Return the server that keeps the object. None: not known, another process now, or it hangs."""
        server, at = self._holders.get(id_hash, (EndpointName(""), now))
        state = fleet.get(server)
        if state is None or state.cold_at > at or now - at > _KEPT_S:
            return None
        # Any other server can only answer 404. So a server that fails is asked too, if it answers at all.
        return None if fleet.failures.proved_to_hang(state) else state

    def check_integrity(self) -> None:
        assert len(self._holders) <= _MOST
