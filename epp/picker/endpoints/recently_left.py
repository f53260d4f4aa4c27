"""Remembers endpoints that left a moment ago and may come back unchanged. For example, a pod that was not
Ready for some seconds still has a warm cache.

This works only if the source names the process (`incarnation`). If a file lists an endpoint again, the picker
cannot know whether its process was restarted meanwhile. `fleet_news` calls this module, and keeps an absent
endpoint's share of the table as long as this module remembers the endpoint.
"""

from __future__ import annotations

from typing import Final

from epp.base.types import Endpoint, EndpointName
from epp.picker.scheduling.snapshot import MOST_KEPT

KEPT_S: Final = 60.0
"""How long an endpoint is remembered: longer than a readiness probe needs to decide, and shorter than a cache
needs to change its content.
"""


class RecentlyLeft:
    """The endpoints that left, by name, and when they left."""

    def __init__(self) -> None:
        self._left: dict[EndpointName, tuple[Endpoint, float]] = {}

    def names(self) -> set[EndpointName]:
        return set(self._left)

    def leave(self, endpoint: Endpoint, *, now: float) -> bool:
        """Remember an endpoint that left. Return False if it cannot come back as the same process, or if too
        many have left.
        """
        if not endpoint.incarnation or len(self._left) >= MOST_KEPT:  # it would come back cold
            return False
        self._left[endpoint.name] = endpoint, now
        return True

    def come_back(self, endpoint: Endpoint) -> bool | None:
        """Return whether an endpoint that came is the same process as the one of this name that had left.
        None: no endpoint of this name had left.
        """
        left = self._left.pop(endpoint.name, None)
        return left[0].process == endpoint.process if left is not None else None

    def give_up(self, *, now: float) -> list[EndpointName]:
        """Forget the endpoints that have been away for too long, and return their names."""
        gone = [name for name, (_, at) in self._left.items() if now - at >= KEPT_S]
        for name in gone:
            del self._left[name]
        return gone

    def clear(self) -> None:
        self._left.clear()

    def check_integrity(self) -> None:
        assert all(
            name == endpoint.name and endpoint.incarnation for name, (endpoint, _) in self._left.items()
        )
