"""The waiting requests in order: first by band, then by tenant (the one with the fewest tokens first), then
by the order within the tenant.

A band holds the requests of one priority. Within a band the tenants share the tokens: each tenant has a tag,
which counts the tokens that were let go for it, and the tenant with the smallest tag goes first. If a tenant
without waiting requests comes back, its tag is raised to the floor of the band, so that no tenant can save up
a share while it is away.

Invariants: a band keeps the flow of each tenant that has waiting requests or a tag above the floor. Other
flows are kept until their places are needed. Counts equal sums.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Generic

from epp.config.flow import Flow
from epp.picker.flow.request import QueueItem, T

OTHERS = "\0others"
"""The name of the tenants beyond the limit, which share one queue. No header can carry this name."""

_MOST_LOOKED_AT = 256
"""The most tenants at other pickers that one search considers, so that the time of a search is bounded."""
_MOST_PRIORITIES = 16
"""The most priorities. A request of a further priority is kept at the next lower priority in use."""
_BY_KEY = attrgetter("key")


class QueueLoad:
    """The numbers of requests, bytes and tokens that wait."""

    __slots__ = ("requests", "size_bytes", "tokens")

    def __init__(self, requests: int = 0, size_bytes: int = 0, tokens: int = 0) -> None:
        self.requests = requests
        self.size_bytes = size_bytes
        self.tokens = tokens

    def add(self, requests: int, size_bytes: int, tokens: int) -> None:
        self.requests += requests
        self.size_bytes += size_bytes
        self.tokens += tokens

    def as_tuple(self) -> tuple[int, int, int]:
        return self.requests, self.size_bytes, self.tokens


ByTenant = Mapping[tuple[int, str], QueueLoad]
"""Loads by priority and tenant."""
NOTHING = QueueLoad()
"""Callers must not change this value."""


class Loads:
    """The waiting requests, counted in all, for each priority, and for each tenant of a priority."""

    def __init__(self) -> None:
        self.in_all = QueueLoad()
        self.by_priority: dict[int, QueueLoad] = {}
        self.by_tenant: dict[tuple[int, str], QueueLoad] = {}

    def of(self, priority: int | None, tenant: str | None) -> QueueLoad:
        """Return one load. tenant None: of all tenants. priority None: in all."""
        if priority is None:
            return self.in_all
        if tenant is None:
            return self.by_priority.get(priority, NOTHING)
        return self.by_tenant.get((priority, tenant), NOTHING)

    def tokens_before(self, priority: int) -> int:
        """Return the tokens that wait at this priority or above."""
        return sum(load.tokens for of, load in self.by_priority.items() if of >= priority)

    def count(self, priority: int, tenant: str, requests: int, size_bytes: int, tokens: int) -> None:
        """Count requests that wait from now on, or do not wait any more if the numbers are negative."""
        self.in_all.add(requests, size_bytes, tokens)
        of_priority = self.by_priority.setdefault(priority, QueueLoad())
        of_priority.add(requests, size_bytes, tokens)
        of_tenant = self.by_tenant.setdefault((priority, tenant), QueueLoad())
        of_tenant.add(requests, size_bytes, tokens)
        if not of_priority.requests:
            del self.by_priority[priority]
        if not of_tenant.requests:
            del self.by_tenant[priority, tenant]


class TenantFlow(Generic[T]):
    """One tenant's requests in one band."""

    __slots__ = ("band", "items", "load", "tag", "tenant")

    def __init__(self, band: Band[T], tenant: str) -> None:
        self.band = band
        self.tenant = tenant
        self.items: list[QueueItem[T]] = []
        """Sorted by `key`."""
        self.load = QueueLoad()
        self.tag = band.floor

    @property
    def waits(self) -> bool:
        """Return whether requests of the tenant wait, here or at other pickers."""
        return bool(self.items) or (self.band.priority, self.tenant) in self.band.elsewhere

    def charge(self, tokens: int) -> None:
        """Count these tokens for the tenant. If none of its requests waits, its tag is first raised to the
        floor.
        """
        band, tag = self.band, self.tag
        if tag < band.floor:
            if not self.waits:
                tag = band.floor
        else:
            band.floor = tag
        self.tag = tag + tokens


class Band(Generic[T]):
    __slots__ = ("elsewhere", "floor", "flows", "priority")

    def __init__(self, priority: int, elsewhere: ByTenant) -> None:
        self.priority = priority
        self.elsewhere = elsewhere
        """The requests that wait at other pickers, of all priorities."""
        self.floor = 0.0
        """The largest tag that a tenant had when it was charged."""
        self.flows: dict[str, TenantFlow[T]] = {}

    def flow(self, tenant: str) -> TenantFlow[T]:
        """Return the flow of this tenant; a missing flow is added. If no request of the tenant waits, its tag
        is raised to the floor.
        """
        flow = self.flows.get(tenant)
        if flow is None:
            flow = self.flows[tenant] = TenantFlow(self, tenant)
        elif not flow.waits:
            flow.tag = max(flow.tag, self.floor)
        return flow

    def first_tag_elsewhere(self) -> float:
        """Return the smallest tag of the tenants with requests that wait at other pickers; inf: there are
        none.
        """
        flows, floor = self.flows, self.floor
        return min(
            (
                flows[tenant].tag if tenant in flows else floor
                for priority, tenant in islice(self.elsewhere, _MOST_LOOKED_AT)
                if priority == self.priority
            ),
            default=inf,
        )

    def knows(self, tenant: str, *, max_tenants: int) -> bool:
        """Return whether the tenant has its own queue, or there is room for one. To make room, the band
        forgets idle tenants whose tag is not above the floor.
        """
        if tenant in self.flows or len(self.flows) < max_tenants:
            return True
        idle = [name for name, flow in self.flows.items() if not flow.waits and flow.tag <= self.floor]
        for name in idle:
            del self.flows[name]
        return len(self.flows) < max_tenants

    def by_share(self, most: int) -> list[TenantFlow[T]]:
        """Return at most this many flows with waiting requests. The tenant with the smallest tag comes
        first.
        """
        waiting = [flow for flow in self.flows.values() if flow.items]
        return nsmallest(most, waiting, key=attrgetter("tag"))

    def worst(self, tenant: str | None) -> QueueItem[T] | None:
        """Return the last request of the tenant that is furthest over its share; with `tenant`, the last
        request of that tenant.
        """
        if tenant is not None:
            flow = self.flows.get(tenant)
            return flow.items[-1] if flow is not None and flow.items else None
        waiting = [flow for flow in self.flows.values() if flow.items]
        if not waiting:
            return None
        # Of equal tenants take the newest request: no waiting request is pushed out by one that is worth no
        # more.
        return max(waiting, key=lambda f: (f.tag + f.load.tokens, f.items[-1].number)).items[-1]


class Queues(Loads, Generic[T]):
    def __init__(self, settings: Flow, elsewhere: ByTenant) -> None:
        """elsewhere: the requests that wait at other pickers."""
        super().__init__()
        self.settings = settings
        """The settings in use. The other parts of flow control read them here, too."""
        self._elsewhere = elsewhere
        self._bands: dict[int, Band[T]] = {}
        """By priority."""

    def __len__(self) -> int:
        return self.in_all.requests

    def __iter__(self) -> Iterator[QueueItem[T]]:
        for band in self._bands.values():
            for flow in band.flows.values():
                yield from flow.items

    def bands(self) -> Sequence[Band[T]]:
        """Return the bands in which requests wait. The band of the highest priority goes first."""
        return [self._bands[priority] for priority in sorted(self.by_priority, reverse=True)]

    def band(self, priority: int) -> Band[T]:
        band = self._bands.get(priority)
        if band is None:
            band = self._bands[priority] = Band(priority, self._elsewhere)
        return band

    def priority(self, wanted: int) -> int:
        """Return the priority under which a request is kept. If there are too many priorities, this is the
        next lower one that is in use, or else the lowest.
        """
        bands, most = self._bands, _MOST_PRIORITIES
        if wanted in bands or len(bands) < most:
            return wanted
        self._forget_idle()
        if len(bands) < most:
            return wanted
        return max((of for of in bands if of <= wanted), default=min(bands))

    def put(self, item: QueueItem[T]) -> None:
        flow = self.band(item.priority).flow(item.tenant)
        insort(flow.items, item, key=_BY_KEY)
        flow.load.add(1, item.size_bytes, item.tokens)
        self.count(item.priority, item.tenant, 1, item.size_bytes, item.tokens)
        item.waits = True

    def take(self, item: QueueItem[T]) -> None:
        """Remove a request from its queue, for whatever reason."""
        flow = self._bands[item.priority].flows[item.tenant]
        at = bisect_left(flow.items, item.key, key=_BY_KEY)
        assert flow.items[at] is item
        del flow.items[at]
        flow.load.add(-1, -item.size_bytes, -item.tokens)
        self.count(item.priority, item.tenant, -1, -item.size_bytes, -item.tokens)
        item.waits = False

    def flow(self, priority: int, tenant: str) -> TenantFlow[T]:
        """Return the flow that is charged for a request of this priority and tenant, and in which the request
        waits if it has to.
        """
        try:
            return self._bands[priority].flows[tenant]
        except KeyError:  # the first request of this priority or tenant
            band = self.band(self.priority(priority))
        knows = band.knows(tenant, max_tenants=self.settings.max_tenants)
        return band.flow(tenant if knows else OTHERS)

    def worst(self, *, priority: int | None = None, tenant: str | None = None) -> QueueItem[T] | None:
        """Return the request that is worth least: the newest request of the tenant that is furthest over its
        share, in the last band. priority and tenant: consider only these.
        """
        if priority is None:
            priority = min(self.by_priority, default=None)
        band = self._bands.get(priority) if priority is not None else None
        return band.worst(tenant) if band is not None else None

    def _forget_idle(self) -> None:
        """Forget the bands in which no request waits, and the tags of their tenants."""
        for priority in self._bands.keys() - self.by_priority.keys():
            del self._bands[priority]

    def check_integrity(self) -> None:
        counted: dict[object, QueueLoad] = {}
        for priority, band in self._bands.items():
            for tenant, flow in band.flows.items():
                assert [h.key for h in flow.items] == sorted(h.key for h in flow.items)
                assert flow.load.tokens == sum(h.tokens for h in flow.items)
                for item in flow.items:
                    assert (item.waits, item.priority, item.tenant) == (True, priority, tenant)
                    assert flow.tag >= 0
                    for scope in (None, item.priority, (item.priority, tenant)):
                        counted.setdefault(scope, QueueLoad()).add(1, item.size_bytes, item.tokens)
        kept: list[tuple[object, QueueLoad]] = [
            (None, self.in_all),
            *self.by_priority.items(),
            *self.by_tenant.items(),
        ]
        assert {scope: load.as_tuple() for scope, load in kept if load.requests} == {
            scope: load.as_tuple() for scope, load in counted.items()
        }
