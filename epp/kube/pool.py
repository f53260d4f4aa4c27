"""Follows one InferencePool and its pods, or the pods of a configured selector, and hands on the endpoints.

Owns the watch of the pods, which is another one whenever the pool's selector changes; until the new one has listed, the
endpoints of the old one stay. Changes are gathered for `_GATHER_S` before they are handed on: of a thousand pods that
start at once the picker sees a few lists of endpoints, not a thousand. Called by `cluster`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Final

from epp.config.kubernetes import Kubernetes
from epp.errors import ConfigError
from epp.kube.discovery import Discovery, label_selector, pool_ports
from epp.kube.objects import Pod, Pool
from epp.kube.reflector import Reader, Reflector, Source
from epp.sources import Keep
from epp.types import Endpoint

_log = logging.getLogger(__name__)

_GATHER_S: Final = 0.1
_RETRY_S: Final = 1.0
_POOLS: Final = "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"
_PODS: Final = "/api/v1/namespaces/{namespace}/pods"


class PoolWatch:
    """`on_endpoints` gets every new list; `on_pool` is called when the pool comes, goes, or is another object."""

    def __init__(
        self,
        reader: Reader,
        settings: Kubernetes,
        *,
        namespace: str,
        on_endpoints: Callable[[Sequence[Endpoint]], None],
        on_pool: Callable[[], None],
        on_state: Callable[[str, bool], None],
        keep: Keep,
        rng: Random,
    ) -> None:
        self._reader = reader
        self._settings = settings
        self._namespace = namespace
        self._on_endpoints = on_endpoints
        self._on_pool = on_pool
        self._on_state = on_state
        self._keep = keep
        self._rng = rng
        self._discovery = Discovery(family=settings.address_family, ports=settings.target_ports)
        self._labels: Mapping[str, str] = {}
        self._pods: Reflector[Pod] | None = None
        self._task: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._complaint = ""
        self.uid = ""
        """Of the pool's object, while there is one."""
        self.exists = bool(settings.selector)
        """Whether there is what policies may target."""
        self.settled = False
        """The endpoints that there were at first have been handed on."""

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if self._settings.selector:
                self._follow(self._settings.selector)
            else:
                group.create_task(
                    self._keep("kubernetes", self._pool_reflector().run), name="watch of the pool"
                )
            await self._keep("kubernetes", self._hand_on)

    # -- what the pool's reflector feeds ---------------------------------------------------------------------------

    def replace(self, pools: Iterable[Pool]) -> None:
        pool = next(iter(pools), None)
        if pool is None:
            self._without_pool()
        else:
            self.put(pool)

    def put(self, pool: Pool) -> None:
        came = not self.exists or self.uid != pool.metadata.uid
        self.exists, self.uid = True, pool.metadata.uid
        self._discovery.set_ports(pool_ports(pool))
        labels = pool.spec.selector.match_labels
        if labels:
            self._follow(labels)
        else:  # it would select every pod of the namespace, the gateway's own among them
            _log.error(
                "InferencePool %s selects nothing: its spec.selector has no labels", pool.metadata.name
            )
            self._stop_following()
        if came:
            self._on_pool()

    def remove(self, _: Pool) -> None:
        self._without_pool()

    def check_integrity(self) -> None:
        self._discovery.check_integrity()
        assert (self._pods is None) == (self._task is None)
        assert self.exists or self._pods is None, "pods are followed for a pool that exists"

    # -- parts -----------------------------------------------------------------------------------------------------

    def _pool_reflector(self) -> Reflector[Pool]:
        source = Source(
            what="pool",
            kind=Pool,
            path=_POOLS.format(namespace=self._namespace),
            # By name, as the picker's Role has it; RBAC grants a list of one.
            selectors=(("fieldSelector", f"metadata.name={self._settings.pool}"),),
        )
        return Reflector(
            self._reader,
            source,
            sink=self,
            on_change=self._changed.set,
            on_state=self._on_state,
            rng=self._rng,
        )

    def _without_pool(self) -> None:
        _log.warning("there is no InferencePool %s: no endpoints", self._settings.pool)
        self._stop_following()
        if self.exists:
            self.exists, self.uid = False, ""
            self._on_pool()

    def _stop_following(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = self._pods = None
        self._labels = {}
        self._discovery.replace(())
        self._discovery.changed = True  # also when there were none: that there are none is now known

    def _follow(self, labels: Mapping[str, str]) -> None:
        if labels == self._labels:
            return
        if self._task is not None:
            self._task.cancel()
        assert self._group is not None, "pods are followed only inside run()"
        self._labels = dict(labels)
        source = Source(
            what="pods",
            kind=Pod,
            path=_PODS.format(namespace=self._namespace),
            selectors=(("labelSelector", label_selector(labels)), ("fieldSelector", "status.phase=Running")),
        )
        self._pods = Reflector(
            self._reader,
            source,
            sink=self._discovery,
            on_change=self._changed.set,
            on_state=self._on_state,
            rng=self._rng,
        )
        self._task = self._group.create_task(
            self._keep("kubernetes", self._pods.run), name="watch of the pods"
        )

    async def _hand_on(self) -> None:
        """Endpoints, whenever there are others. Those of a watch that has not listed yet are not known to be all."""
        handed_on: list[Endpoint] | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            listed = self._pods is None or self._pods.synced
            if listed and (self._discovery.changed or handed_on is None):
                endpoints = self._discovery.endpoints()
                if endpoints != handed_on:
                    handed_on = endpoints if self._use(endpoints) else None
                    self.settled = self.settled or handed_on is not None
                if handed_on is None:
                    await asyncio.sleep(_RETRY_S)
                    self._changed.set()
            await asyncio.sleep(_GATHER_S)

    def _use(self, endpoints: Sequence[Endpoint]) -> bool:
        """False: they could not be put to use for the moment."""
        try:
            self._on_endpoints(endpoints)
        except ConfigError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("new endpoints cannot be put to use yet, trying on: %s", error)
            return False
        self._complaint = ""
        return True
