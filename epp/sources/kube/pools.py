"""Follows all pools of the configuration, and passes on the endpoints of all of them as one list.

The first list is passed on only when every pool is known, so that a starting picker does not refuse the
models of a pool that is listed a moment later. A pool that does not exist counts as known, without endpoints.
Changes are collected for `_GATHER_S` before they are passed on. So when a thousand pods start at once, the
picker gets a few lists of endpoints and not a thousand. Called by `cluster`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final

from epp.base.types import Endpoint, EndpointName
from epp.config.kubernetes import Kubernetes
from epp.sources.keep import Keep
from epp.sources.kube.discovery import in_several, united
from epp.sources.kube.pool import PoolWatch
from epp.sources.kube.reflector import Reader

_log = logging.getLogger(__name__)

_GATHER_S: Final = 0.1
_RETRY_S: Final = 1.0
_NAMED: Final = 5


class Pools:
    """`on_endpoints` gets every new list, and the names of the existing pools. `on_pool` is called when a
    pool comes, goes, or is another object.
    """

    def __init__(
        self,
        reader: Reader,
        settings: Kubernetes,
        *,
        namespace: str,
        on_endpoints: Callable[[Sequence[Endpoint], frozenset[str]], None],
        on_pool: Callable[[], None],
        on_state: Callable[[str, bool], None],
        keep: Keep,
        rng: Random,
    ) -> None:
        self._on_endpoints = on_endpoints
        self._on_state = on_state
        self._keep = keep
        self._changed = asyncio.Event()
        self._complaint = ""
        self._states: dict[tuple[str, str], bool] = {}
        """For each kind of object and pool, whether the API server lets us follow it."""
        self._shared: frozenset[EndpointName] = frozenset()
        """The endpoints of several pools that were logged last."""
        self._watches = [
            PoolWatch(
                reader,
                settings,
                name,
                namespace=namespace,
                on_change=self._changed.set,
                on_pool=on_pool,
                on_state=partial(self._followed, name),
                keep=keep,
                rng=rng,
            )
            for name in settings.names
        ]
        self.settled = False
        """Whether the first endpoints have been passed on."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watch in self._watches:
                group.create_task(watch.run(), name=f"pool {watch.name}")
            await self._keep("kubernetes", self._hand_on)

    @property
    def existing(self) -> frozenset[str]:
        return frozenset(watch.name for watch in self._watches if watch.exists)

    def check_integrity(self) -> None:
        for watch in self._watches:
            watch.check_integrity()

    def _followed(self, pool: str, what: str, so: bool) -> None:  # noqa: FBT001 - the shape of a reflector's callback
        self._states[what, pool] = so
        self._on_state(what, all(so for (each, _), so in self._states.items() if each == what))

    async def _hand_on(self) -> None:
        """Pass on the endpoints when they have changed. The first list waits until all pools are known."""
        handed_on: tuple[list[Endpoint], frozenset[str]] | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            heard_of_all = self.settled or all(watch.known for watch in self._watches)
            if heard_of_all and (handed_on is None or any(watch.changed for watch in self._watches)):
                news = self._endpoints(), self.existing
                if news != handed_on:
                    handed_on = news if self._use(*news) else None
                    self.settled = self.settled or handed_on is not None
                if handed_on is None:
                    await asyncio.sleep(_RETRY_S)
                    self._changed.set()
            await asyncio.sleep(_GATHER_S)

    def _endpoints(self) -> list[Endpoint]:
        found = [watch.found() for watch in self._watches]
        shared = frozenset(in_several(found))
        if shared - self._shared:
            names = ", ".join(sorted(shared)[:_NAMED])
            _log.warning(
                "%d endpoints belong to several InferencePools and count for the first of them: %s",
                len(shared),
                names,
            )
        self._shared = shared
        return united(found)

    def _use(self, endpoints: Sequence[Endpoint], existing: frozenset[str]) -> bool:
        """Pass on the endpoints. Return False if they cannot be used at the moment."""
        try:
            self._on_endpoints(endpoints, existing)
        except OSError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("cannot use the new endpoints yet and will try again: %s", error)
            return False
        self._complaint = ""
        return True
