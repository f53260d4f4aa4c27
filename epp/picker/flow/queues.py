"""The waiting requests in order: first by band, then by tenant (the one with the fewest tokens first), then
by the order within the tenant.

A band holds the requests of one priority. Within a band the tenants share the tokens: each tenant has a tag,
which counts the tokens that were let go for it, and the tenant with the smallest tag goes first. If a tenant
without waiting requests comes back, its tag is raised to the floor of the band, so that no tenant can save up
a share while it is away.

Invariants: a band keeps the flow of each tenant that has waiting requests or a tag above the floor. Other
flows are kept until their places are needed. Counts equal sums. The waiting requests are within the bounds of
requests and of bytes at every moment: in all, and for each tenant.

An alarm is the time at which a request is considered again even if no event happens before: the latest time
at which it can start, or the time at which it expires.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from epp.config.flow import Flow, WaitingSettings

T = TypeVar("T")
OTHERS = "\0others"
"""The name of the tenants beyond the limit, which share one queue. No header can carry this name."""

_MOST_PRIORITIES = 16
"""The most priorities. A request of a further priority is kept at the next lower priority in use."""
_MOST_SHED = 64
"""A new request may push out at most this many waiting requests."""
_BY_PLACE = attrgetter("place", "number")
_BY_ALARM = attrgetter("alarm_at", "number")
_BY_EXCESS = attrgetter("excess")


@dataclass(slots=True, eq=False, kw_only=True)
class QueueItem(Generic[T]):
    """A waiting request. Everybody may read it. Only `control` and this module write it."""

    payload: T
    place: float
    """The place among the requests of its tenant. Of two with the same place the first to come goes first."""
    number: int
    """The number of the request in order of arrival."""
    priority: int
    tenant: str
    """The name under which the share is charged: the name of the tenant, or `OTHERS`."""
    size_bytes: int
    tokens: int
    """Tokens to compute, as forecast when the request came."""
    arrived_at: float
    deadline: float
    """When the first token is due; inf: no deadline."""
    expires_at: float
    alarm_at: float = inf
    """Its alarm. inf: it has none."""
    look_at: float = 0.0
    """The search passes over the request until then, because its server is predicted to be busy."""
    waits: bool = False


class QueueLoad:
    """The numbers of requests, bytes and tokens that wait."""

    __slots__ = ("requests", "size_bytes", "tokens")

    def __init__(self) -> None:
        self.requests = self.size_bytes = self.tokens = 0

    def count(self, item: QueueItem[T], by: int) -> None:
        """Count a request. by: 1 if it waits from now on, or -1 if it no longer waits."""
        self.requests += by
        self.size_bytes += by * item.size_bytes
        self.tokens += by * item.tokens

    def over(self, bound: WaitingSettings) -> bool:
        return self.requests > bound.max_requests or self.size_bytes > bound.max_bytes


class TenantFlow(Generic[T]):
    """One tenant's requests in one band."""

    __slots__ = ("band", "items", "load", "tag", "tenant")

    def __init__(self, band: Band[T], tenant: str) -> None:
        self.band = band
        self.tenant = tenant
        self.items: list[QueueItem[T]] = []
        """Sorted by `_BY_PLACE`. Most requests come last and leave first."""
        self.load = QueueLoad()
        self.tag = band.floor

    @property
    def excess(self) -> tuple[float, int]:
        """How far the tenant is over its share; some request of it waits. Of equal tenants the one with the
        newest request is worse: no waiting request is pushed out by one that is worth no more.
        """
        return self.tag + self.load.tokens, self.items[-1].number

    def charge(self, tokens: int) -> None:
        """Count these tokens for the tenant. If none of its requests waits, its tag is first raised to the
        floor.
        """
        band = self.band
        tag = self.tag if self.items else max(self.tag, band.floor)
        band.floor = max(band.floor, tag)
        self.tag = tag + tokens


class Band(Generic[T]):
    __slots__ = ("floor", "flows", "load", "lost_at", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.load = QueueLoad()
        self.floor = 0.0
        """The largest tag that a tenant had when it was charged."""
        self.lost_at = -inf
        """When a request of a tenant that is not greedy was refused last for its deadline."""
        self.flows: dict[str, TenantFlow[T]] = {}

    def flow(self, tenant: str, *, max_tenants: int) -> TenantFlow[T]:
        """Return the flow of this tenant, or that of the others if there is no room for one more. To make
        room, the band forgets idle tenants whose tag is not above the floor.
        """
        flows = self.flows
        if tenant not in flows and len(flows) >= max_tenants:
            for name in [n for n, flow in flows.items() if not flow.items and flow.tag <= self.floor]:
                del flows[name]
            if len(flows) >= max_tenants:
                tenant = OTHERS
        if tenant not in flows:
            flows[tenant] = TenantFlow(self, tenant)
        return flows[tenant]

    def waiting(self) -> list[TenantFlow[T]]:
        return [flow for flow in self.flows.values() if flow.items]


class Queues(Generic[T]):
    def __init__(self, settings: Flow) -> None:
        self.settings = settings
        """The settings in use. The other parts of flow control read them here, too."""
        self.load = QueueLoad()
        self._bands: dict[int, Band[T]] = {}
        """By priority."""

    def bands(self) -> Sequence[Band[T]]:
        """Return the bands in which requests wait. The band of the highest priority goes first."""
        waiting = [band for band in self._bands.values() if band.load.requests]
        return sorted(waiting, key=attrgetter("priority"), reverse=True)

    def flow(self, priority: int, tenant: str) -> TenantFlow[T]:
        """Return the flow that is charged for a request of this priority and tenant, and in which the request
        waits if it has to. If there are too many priorities, its band is the next lower one that is in use,
        or else the lowest.
        """
        bands = self._bands
        band = bands.get(priority)
        if band is None:
            if len(bands) >= _MOST_PRIORITIES:
                for idle in [of for of, band in bands.items() if not band.load.requests]:
                    del bands[idle]
            if len(bands) >= _MOST_PRIORITIES:
                priority = max((of for of in bands if of <= priority), default=min(bands))
            band = bands.setdefault(priority, Band(priority))
        return band.flow(tenant, max_tenants=self.settings.max_tenants)

    def take(self, item: QueueItem[T]) -> None:
        """Remove a request from its queue, for whatever reason."""
        flow = self._bands[item.priority].flows[item.tenant]
        at = 0 if flow.items[0] is item else bisect_left(flow.items, _BY_PLACE(item), key=_BY_PLACE)
        assert flow.items[at] is item
        del flow.items[at]
        self._count(flow, item, -1)

    def admit(self, item: QueueItem[T]) -> list[QueueItem[T]]:
        """Let the new request wait. If this exceeds a bound, take out the requests that are worth least, and
        return them. If the new request itself is worth least, take out only the new request.
        """
        self._put(item)
        victims: list[QueueItem[T]] = []
        flow = self._bands[item.priority].flows[item.tenant]
        while (worst := self._worst_over(flow)) is not None:
            if worst is item or len(victims) == _MOST_SHED:
                self.take(item)
                for victim in victims:
                    self._put(victim)
                return [item]
            self.take(worst)
            victims.append(worst)
        return victims

    def apply(self, settings: Flow) -> list[QueueItem[T]]:
        """Apply new settings. Take out the requests that exceed a bound."""
        self.settings = settings
        victims = []
        for flow in [flow for band in self.bands() for flow in band.waiting()]:
            while flow.load.over(settings.per_tenant):
                victims.append(flow.items[-1])
                self.take(flow.items[-1])
        for band in reversed(self.bands()):
            flows = sorted(band.waiting(), key=_BY_EXCESS)  # kept in order: tens of thousands may be too many
            while flows and self.load.over(settings.in_all):
                flow = flows.pop()
                victims.append(flow.items[-1])
                self.take(flow.items[-1])
                if flow.items:
                    insort(flows, flow, key=_BY_EXCESS)
        return victims

    def _put(self, item: QueueItem[T]) -> None:
        flow = self._bands[item.priority].flows[item.tenant]
        if not flow.items:
            flow.tag = max(flow.tag, flow.band.floor)
        comes_last = bool(flow.items) and _BY_PLACE(flow.items[-1]) < _BY_PLACE(item)
        insort(flow.items, item, lo=len(flow.items) if comes_last else 0, key=_BY_PLACE)
        self._count(flow, item, 1)

    def _count(self, flow: TenantFlow[T], item: QueueItem[T], by: int) -> None:
        item.waits = by > 0
        for load in (flow.load, flow.band.load, self.load):
            load.count(item, by)

    def _worst_over(self, flow: TenantFlow[T]) -> QueueItem[T] | None:
        """Return the request that is worth least, where a bound that counts this flow is exceeded: the newest
        request of the tenant, or of the last band.
        """
        settings = self.settings
        if flow.load.over(settings.per_tenant):
            return flow.items[-1]
        too_many = self.load.over(settings.in_all)
        return max(self.bands()[-1].waiting(), key=_BY_EXCESS).items[-1] if too_many else None


class _Waits(Protocol):
    """A request that has to be looked at by a certain time."""

    alarm_at: float
    number: int
    expires_at: float


W = TypeVar("W", bound=_Waits)


class Alarms(Generic[W]):
    """The times at which waiting requests have to be looked at."""

    def __init__(self) -> None:
        self._items: list[W] = []
        """Sorted by `_BY_ALARM`. Most requests come last and leave first."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def due_at(self) -> float:
        return self._items[0].alarm_at if self._items else inf

    def set(self, item: W, at: float) -> None:
        """Set the next alarm of a request that has none. The request also gets one when it expires."""
        item.alarm_at = min(at, item.expires_at)
        comes_last = bool(self._items) and _BY_ALARM(self._items[-1]) < _BY_ALARM(item)
        insort(self._items, item, lo=len(self._items) if comes_last else 0, key=_BY_ALARM)

    def set_all(self, items: Sequence[W], at: float) -> None:
        """Set the alarms of many requests, which have alarms, to this time."""
        for item in items:
            item.alarm_at = at
        self._items.sort(key=_BY_ALARM)

    def due(self, *, now: float) -> Iterator[W]:
        """Take out each request whose alarm is due."""
        while self.due_at <= now:
            yield self._items.pop(0)

    def forget(self, item: W) -> None:
        """Remove the alarm of a request, if it has one."""
        at = 0 if self._items[:1] == [item] else bisect_left(self._items, _BY_ALARM(item), key=_BY_ALARM)
        if at < len(self._items) and self._items[at] is item:
            del self._items[at]
