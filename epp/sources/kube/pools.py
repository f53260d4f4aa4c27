"""Follows the pools of the configuration and their pods, or the pods of a configured selector, and passes on
the endpoints of all of them as one list.

A changed selector or port of a pool starts a new watch of its pods. Until the new watch has listed its pods,
the endpoints of the old watch stay.

The first list is passed on only when every pool is known, so that a starting picker does not refuse the
models of a pool that is listed a moment later. A pool that does not exist counts as known, without endpoints.
Changes are collected for `_GATHER_S` before they are passed on. So when a thousand pods start at once, the
picker gets a few lists of endpoints and not a thousand. Called by `cluster`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from epp.base.errors import ConfigError
from epp.base.types import Endpoint
from epp.config.kubernetes import Kubernetes
from epp.sources.kube.discovery import Discovery, Found, pool_ports, united
from epp.sources.kube.objects import Pod, Pool
from epp.sources.kube.reflector import Access, ListSource, Reflector

_log = logging.getLogger(__name__)

_POOLS: Final = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
_PODS: Final = "/api/v1/namespaces/{}/pods"
_GATHER_S: Final = 0.1


class PoolWatch:
    """`on_change` is called when the endpoints may have changed; `on_pool` when the pool comes or goes. The
    reflector of the pool calls `replace`, `put` and `remove`.
    """

    def __init__(
        self,
        access: Access,
        settings: Kubernetes,
        name: str,
        *,
        on_change: Callable[[], None],
        on_pool: Callable[[], None],
    ) -> None:
        self.name = name
        self._access = access
        self._settings = settings
        self._on_change = on_change
        self._on_pool = on_pool
        self._followed: tuple[Mapping[str, str], Sequence[int]] = {}, ()
        """Labels and ports of the pods."""
        self._discovery = self._new_discovery()
        self._found: Sequence[Found] = ()
        # By name, as in the picker's Role: RBAC allows listing a single object.
        selectors = (("fieldSelector", f"metadata.name={name}"),)
        source = ListSource("pool", Pool, _POOLS.format(access.namespace), selectors)
        self._pool = Reflector(access, source, sink=self, on_change=on_change)
        self._pods: Reflector[Pod] | None = None
        self._task: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self.exists = bool(settings.selector)
        """Whether the pool exists, so that policies may target it."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            if self._settings.selector:
                self._follow(self._settings.selector, self._settings.target_ports)
                await asyncio.get_running_loop().create_future()  # waits until cancelled
            await self._access.keep("kubernetes", self._pool.run)

    @property
    def known(self) -> bool:
        """Whether the pods of the current pool have been listed, or are known not to exist."""
        return self._pods.synced if self._pods is not None else self._pool.synced

    @property
    def changed(self) -> bool:
        """Whether the endpoints may differ from those that `found` returned last."""
        return self.known and self._discovery.changed

    def found(self) -> Sequence[Found]:
        """Return the endpoints: those from before while the pods of a new watch are not listed yet."""
        if self.changed:
            self._found = self._discovery.found()
        return self._found

    def replace(self, pools: Iterable[Pool]) -> None:
        pool = next(iter(pools), None)
        self.put(pool) if pool is not None else self.remove()

    def put(self, pool: Pool) -> None:
        came, self.exists = not self.exists, True
        labels = pool.spec.selector.match_labels
        if not labels:  # it would select every pod of the namespace, including the gateway's own pods
            _log.error("InferencePool %s selects nothing: its spec.selector has no labels", self.name)
        self._follow(labels, pool_ports(pool))
        if came:
            self._on_pool()

    def remove(self, _: Pool | None = None) -> None:
        _log.warning("InferencePool %s does not exist, so it has no endpoints", self.name)
        self._follow({}, ())
        if self.exists:
            self.exists = False
            self._on_pool()

    def check_integrity(self) -> None:
        self._discovery.check_integrity()
        assert (self._pods is None) == (self._task is None)
        assert self.exists or self._pods is None, "pods are followed for a pool that exists"

    def _follow(self, labels: Mapping[str, str], ports: Sequence[int]) -> None:
        """Follow the pods with these labels. Without labels there are none."""
        if labels and (labels, ports) == self._followed:
            return
        if self._task is not None:
            self._task.cancel()
        self._task = self._pods = None
        self._followed = labels, ports
        self._discovery = self._new_discovery()
        if not labels:
            return
        assert self._group is not None, "pods are followed only inside run()"
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        selectors = (("labelSelector", selector), ("fieldSelector", "status.phase=Running"))
        source = ListSource("pods", Pod, _PODS.format(self._access.namespace), selectors)
        self._pods = Reflector(self._access, source, sink=self._discovery, on_change=self._on_change)
        self._task = self._group.create_task(
            self._access.keep("kubernetes", self._pods.run), name=f"watch of the pods of {self.name}"
        )

    def _new_discovery(self) -> Discovery:
        _, ports = self._followed
        return Discovery(pool=self.name, family=self._settings.address_family, ports=ports)


class Pools:
    """`on_endpoints` gets every new list, and the names of the existing pools. `on_pool` is called when a
    pool comes or goes.
    """

    def __init__(
        self,
        access: Access,
        settings: Kubernetes,
        *,
        on_endpoints: Callable[[Sequence[Endpoint], frozenset[str]], None],
        on_pool: Callable[[], None],
    ) -> None:
        self._access = access
        self._on_endpoints = on_endpoints
        self._changed = asyncio.Event()
        self._states: dict[tuple[str, str], bool] = {}
        """For each kind of object and pool, whether the API server lets us follow it."""
        self._watches = [
            PoolWatch(
                replace(access, on_state=partial(self._followed, name)),
                settings,
                name,
                on_change=self._changed.set,
                on_pool=on_pool,
            )
            for name in settings.names
        ]
        self.settled = False
        """Whether the first endpoints have been passed on."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watch in self._watches:
                group.create_task(watch.run(), name=f"watch of the pool {watch.name}")
            await self._access.keep("kubernetes", self._hand_on)

    @property
    def existing(self) -> frozenset[str]:
        return frozenset(watch.name for watch in self._watches if watch.exists)

    def check_integrity(self) -> None:
        for watch in self._watches:
            watch.check_integrity()

    def _followed(self, pool: str, what: str, so: bool) -> None:  # noqa: FBT001 - the shape of a reflector's callback
        self._states[what, pool] = so
        self._access.on_state(what, all(so for (each, _), so in self._states.items() if each == what))

    async def _hand_on(self) -> None:
        """Pass on the endpoints when they have changed. The first list waits until all pools are known.
        Raises ConfigError if they cannot be used at the moment, as on a full disk.
        """
        handed_on: tuple[list[Endpoint], frozenset[str]] | None = None
        self._changed.set()  # after a failure, the same endpoints are passed on again
        while True:
            await self._changed.wait()
            self._changed.clear()
            heard_of_all = self.settled or all(watch.known for watch in self._watches)
            if heard_of_all and (handed_on is None or any(watch.changed for watch in self._watches)):
                news = united([watch.found() for watch in self._watches]), self.existing
                if news != handed_on:
                    try:
                        self._on_endpoints(*news)
                    except OSError as error:
                        raise ConfigError(f"the new endpoints cannot be used yet: {error}") from error
                    handed_on, self.settled = news, True
            await asyncio.sleep(_GATHER_S)
