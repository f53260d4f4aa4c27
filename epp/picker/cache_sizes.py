"""Keeps the size of each server's mirror right: as the server states it, as the policy assumes it, or as the
picker has learned it.

Every mirror of an endpoint gets its size here. Only `sharing.listener` sets a size too, for a server that has
not stated one yet. Synchronous; no request runs this code. Caller: `fleet_news`.
"""

from __future__ import annotations

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.growth import growth
from epp.picker.endpoints.learned import sample_of
from epp.picker.prefix_index.eviction import charge
from epp.picker.prefix_index.servers import add_endpoint, clear_endpoint, resize
from epp.picker.server_caches import ServerCaches

_STATED_SPAN = 1.25
"""A size that the server states is corrected by at most this factor, up or down, since running requests use a
part of the cache."""
_ASSUMED_SPAN = 32.0
"""A size that the policy assumes is corrected by at most this factor."""
_FULL_SHARE = 0.9
"""A mirror that uses this share of its size would hold more if it were larger."""
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
        """Learn from one scrape, which the endpoint's state has already taken in. before: the last scrape of
        the same process.
        """
        tokens = self._caches.learned(state.model).tokens
        sample = sample_of(state.window, after)
        if sample:
            tokens.learn(*sample)
        answered = growth(before.generated_tokens, after.generated_tokens) if before is not None else None
        if answered and not self._outgrown(state):
            size_bytes = int(answered * tokens.bytes_per_token)
            charge(self._caches.table, state.endpoint.name, size_bytes=size_bytes, now=now)
        self._learn_size(state, after, now=now)
        self.fit(state)

    def _learn_size(self, state: EndpointState, metrics: EndpointMetrics, *, now: float) -> None:
        if metrics.prefix_hits is None or not self._caches.spec.table.learn_capacity:
            return
        mirror = self._caches.table.mirrors[state.endpoint.name]
        wiped = self._caches.learned(state.model).cache.observe(
            state.hits,
            hits=metrics.prefix_hits,
            waiting=metrics.waiting,
            bounded=mirror.used_bytes > _FULL_SHARE * mirror.capacity_bytes,
            span=_STATED_SPAN if metrics.capacity_tokens else _ASSUMED_SPAN,
            now=now,
        )
        if wiped:
            clear_endpoint(self._caches.table, state.endpoint.name)

    def _capacity_bytes(self, state: EndpointState) -> int:
        """Return the capacity of the server's mirror. It has room for everything that the server says it
        holds, since a guess must not evict that.
        """
        return max(self._assumed_bytes(state), self._reported_bytes(state))

    def _assumed_bytes(self, state: EndpointState) -> int:
        table, learned = self._caches.spec.table, self._caches.learned(state.model)
        stated = state.metrics.capacity_tokens if state.metrics else None
        factor = learned.cache.factor if table.learn_capacity else 1.0
        return int((stated or table.default_capacity_tokens) * factor * learned.tokens.bytes_per_token)

    def _outgrown(self, state: EndpointState) -> bool:
        """Return whether the server says that it holds more than the assumed size of its cache."""
        return self._reported_bytes(state) > self._assumed_bytes(state)

    def _reported_bytes(self, state: EndpointState) -> int:
        return self._caches.reported.known_bytes.get(state.endpoint.name, 0)
