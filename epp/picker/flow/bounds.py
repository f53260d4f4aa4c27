"""Bounds the waiting requests, both at this picker and at all pickers together. If too many requests wait,
this module decides which request is removed.

There are bounds of requests and of bytes: in all, for each priority and for each tenant. The requests of this
picker are within the bounds at every moment. Requests at other pickers count too, when a new request comes.
The reports about them arrive with a delay, so that all pickers together may exceed a bound for a moment.
"""

from __future__ import annotations

from typing import Generic

from epp.picker.flow.elsewhere import Elsewhere
from epp.picker.flow.queues import NOTHING, QueueLoad, Queues
from epp.picker.flow.request import QueueItem, T

_MAX_SHED = 64
"""A new request may push out at most this many waiting requests."""


class Bounds(Generic[T]):
    def __init__(self, queues: Queues[T], elsewhere: Elsewhere) -> None:
        self._queues = queues
        self._elsewhere = elsewhere

    def admit(self, item: QueueItem[T]) -> list[QueueItem[T]]:
        """Let the new request wait. If this exceeds a bound, take out the requests that are worth least, and
        return them. If the new request itself is worth least, take out only the new request.
        """
        self._queues.put(item)
        victims: list[QueueItem[T]] = []
        for scope in ((item.priority, item.tenant), (item.priority, None), (None, None)):
            # For requests at other pickers, a new request makes room once: the other pickers do the same.
            while self.over(*scope) or (not victims and self.over(*scope, others=self._elsewhere.of(*scope))):
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

    def over_by_settings(self) -> list[QueueItem[T]]:
        """Take out the requests that exceed a bound after a change of the settings."""
        victims = []
        for scope in self.scopes_over():
            while self.over(*scope):
                victim = self._queues.worst(priority=scope[0], tenant=scope[1])
                assert victim is not None
                self._queues.take(victim)
                victims.append(victim)
        return victims

    def over(self, priority: int | None, tenant: str | None, *, others: QueueLoad = NOTHING) -> bool:
        """Return whether the requests in this scope, with those at other pickers, exceed their bound."""
        settings = self._queues.settings
        bound = settings.per_tenant
        if priority is None:
            bound = settings.in_all
        elif tenant is None:
            bound = settings.per_priority
        load = self._queues.of(priority, tenant)
        return (
            load.requests + others.requests > bound.max_requests
            or load.size_bytes + others.size_bytes > bound.max_bytes
        )

    def scopes_over(self) -> list[tuple[int | None, str | None]]:
        """Return the scopes whose bound is exceeded, as arguments of `over`: the tenants first."""
        scopes: list[tuple[int | None, str | None]] = [*self._queues.by_tenant]
        scopes += [(priority, None) for priority in self._queues.by_priority]
        scopes.append((None, None))
        return [scope for scope in scopes if self.over(*scope)]
