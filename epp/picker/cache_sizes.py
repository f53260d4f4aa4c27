"""Keeps the size of each server's mirror right: as the server states it, or as the policy assumes it.

Every mirror of an endpoint gets its size here. Only `sharing.listener` sets a size too, for a server that has
not stated one yet. Synchronous; no request runs this code. Caller: `fleet_news`.
"""

from __future__ import annotations

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.growth import growth
from epp.picker.prefix_index.eviction import charge
from epp.picker.prefix_index.servers import add_endpoint, clear_endpoint, resize
from epp.picker.server_caches import ServerCaches

_MISSES = 3
"""After so many misses in a row where hits were expected, the server has emptied its cache."""
_RESIZE_RATIO = 0.02
"""Smaller changes of a capacity are ignored."""


class CacheSizes:
    def __init__(self, caches: ServerCaches) -> None:
        self._caches = caches

    def add(self, state: EndpointState) -> None:
        """Start an empty mirror for a server."""
        add_endpoint(self._caches.table, state.endpoint.name, capacity_bytes=self._capacity_bytes(state))

    def fit(self, state: EndpointState) -> None:
        """Let the mirror of a server follow the server's capacity."""
        table, name = self._caches.table, state.endpoint.name
        capacity, had = self._capacity_bytes(state), table.mirrors[name].capacity_bytes
        if abs(capacity - had) > _RESIZE_RATIO * had:
            resize(table, name, capacity_bytes=capacity)

    def observe(
        self, state: EndpointState, before: EndpointMetrics | None, after: EndpointMetrics, *, now: float
    ) -> None:
        """Take in one scrape, which the endpoint's state has already taken in. before: the last scrape of the
        same process.
        """
        tokens = self._caches.token_estimate(state.model)
        answered = growth(before.generated_tokens, after.generated_tokens) if before is not None else None
        if answered and not self._outgrown(state):
            size_bytes = int(answered * tokens.bytes_per_token)
            charge(self._caches.table, state.endpoint.name, size_bytes=size_bytes, now=now)
        if before is None or after.prefix_hits is None or growth(before.prefix_hits, after.prefix_hits):
            state.missed = 0
        elif state.missed >= _MISSES:
            state.missed = 0
            clear_endpoint(self._caches.table, state.endpoint.name)
        self.fit(state)

    def _capacity_bytes(self, state: EndpointState) -> int:
        """Return the capacity of the server's mirror. It has room for everything that the server says it
        holds, since a guess must not evict that.
        """
        return max(self._assumed_bytes(state), self._reported_bytes(state))

    def _assumed_bytes(self, state: EndpointState) -> int:
        stated = state.metrics.capacity_tokens if state.metrics else None
        tokens = stated or self._caches.spec.table.default_capacity_tokens
        return int(tokens * self._caches.token_estimate(state.model).bytes_per_token)

    def _outgrown(self, state: EndpointState) -> bool:
        """Return whether the server says that it holds more than the assumed size of its cache."""
        return self._reported_bytes(state) > self._assumed_bytes(state)

    def _reported_bytes(self, state: EndpointState) -> int:
        return self._caches.reported.known_bytes.get(state.endpoint.name, 0)
