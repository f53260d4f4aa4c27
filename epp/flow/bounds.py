"""Bounds the waiting requests, both at this picker and at all pickers together. If too many requests wait,
this module decides which request is removed.

There are bounds of requests and of bytes: in all, for each priority and for each tenant. The requests of this
picker are within the bounds at every moment. The requests of all pickers may exceed a bound, because reports
of other pickers arrive with a delay. Afterwards new requests are refused, or waiting requests are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic

from epp.flow.elsewhere import Elsewhere
from epp.flow.queues import NOTHING, Load, Queues
from epp.flow.request import QueueItem, T

_MAX_SHED = 64
"""A new request may push out at most this many waiting requests."""
_POOL_SHED_S = 0.25
"""The least time between two removals that are made because of requests at other pickers. Reports of other
pickers take less time than this to arrive.
"""


class Bounds(Generic[T]):
    def __init__(self, queues: Queues[T], elsewhere: Elsewhere) -> None:
        self._queues = queues
        self._elsewhere = elsewhere
        self._pool_shed_at = 0.0

    def admit(self, item: QueueItem[T]) -> list[QueueItem[T]]:
        """Let the new request wait. If this exceeds a bound, take out the requests that are worth least, and
        return them. If the new request itself is worth least, take out only the new request.
        """
        self._queues.put(item)
        victims: list[QueueItem[T]] = []
        for scope in ((item.priority, item.tenant), (item.priority, None), (None, None)):
            while self.over(*scope) or self._too_many_in_pool(item, victims, scope):
                worst = self._queues.worst(priority=scope[0], tenant=scope[1])
                assert worst is not None
                if worst is item or len(victims) == _MAX_SHED:
                    self._queues.take(item)
                    for victim in victims:
                        self._queues.put(victim)
                    return [item]
                self._queues.take(worst)
                victims.append(worst)
        return victims

    def _too_many_in_pool(
        self, item: QueueItem[T], victims: Sequence[QueueItem[T]], scope: tuple[int | None, str | None]
    ) -> bool:
        """Return whether too many requests wait at all pickers together, so that the new request must still
        make room. It makes room for itself only: the other pickers take out the requests that they let wait
        at the same moment. The new request also pushes out no request with a higher priority than some
        request at another picker.
        """
        others = self._elsewhere.of(*scope)
        if not others.requests or not self.over(*scope, others=others):
            return False
        if victims and sum(victim.size_bytes for victim in victims) >= item.size_bytes:
            return False
        worst, lowest = self._queues.worst(priority=scope[0], tenant=scope[1]), self._elsewhere.lowest
        return worst is None or scope[0] is not None or lowest is None or worst.priority <= lowest

    def over_in_pool(self, *, now: float) -> Iterator[QueueItem[T]]:
        """If too many requests wait at all pickers together, take out this picker's share of the excess. Only
        requests of the lowest priority of all pickers are taken out.
        """
        bound, here, there = self._queues.settings.in_all, self._queues.in_all, self._elsewhere.in_all
        if not here.requests or now < self._pool_shed_at:
            return
        lowest = min(self._queues.by_priority)
        below = self._elsewhere.lowest
        if below is not None and below < lowest:
            return
        own, other = self._queues.by_priority[lowest], self._elsewhere.by_priority.get(lowest, NOTHING)
        requests_over = here.requests + there.requests - bound.requests
        bytes_over = here.size_bytes + there.size_bytes - bound.size_bytes
        share = max(
            requests_over / (own.requests + other.requests),
            bytes_over / max(1, own.size_bytes + other.size_bytes),
        )
        for _ in range(min(int(share * own.requests), own.requests, _MAX_SHED)):
            self._pool_shed_at = now + _POOL_SHED_S
            victim = self._queues.worst()
            assert victim is not None
            self._queues.take(victim)
            yield victim

    def over_by_settings(self) -> Iterator[QueueItem[T]]:
        """Take out the requests that exceed a bound after a change of the settings."""
        for scope in self.scopes_over():
            while self.over(*scope):
                victim = self._queues.worst(priority=scope[0], tenant=scope[1])
                assert victim is not None
                self._queues.take(victim)
                yield victim

    def over(self, priority: int | None, tenant: str | None, *, others: Load = NOTHING) -> bool:
        """Return whether the requests in this scope, with those at other pickers, exceed their bound."""
        settings = self._queues.settings
        bound = settings.per_tenant
        if priority is None:
            bound = settings.in_all
        elif tenant is None:
            bound = settings.per_priority
        load = self._queues.of(priority, tenant)
        return (
            load.requests + others.requests > bound.requests
            or load.size_bytes + others.size_bytes > bound.size_bytes
        )

    def scopes_over(self) -> list[tuple[int | None, str | None]]:
        """Return the scopes whose bound is exceeded, as arguments of `over`: the tenants first."""
        scopes: list[tuple[int | None, str | None]] = [*self._queues.by_tenant]
        scopes += [(priority, None) for priority in self._queues.by_priority]
        scopes.append((None, None))
        return [scope for scope in scopes if self.over(*scope)]
