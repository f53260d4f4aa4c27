"""Keeps the Lease that names the picker that writes status: reads the Lease, takes or renews it, and gives it
back at the end.

The rules are in `lease`; this module sends the requests. A replica that cannot reach the API server stops
being the holder, which does not affect picking. Called by `cluster`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import msgspec

from epp.sources.kube.api import Api, ApiError, read
from epp.sources.kube.lease import Election, Step
from epp.sources.kube.objects import Lease, LeaseSpec

_log = logging.getLogger(__name__)

_TRIES_IN_TIME: Final = 6
"""Renewals within the duration of one lease. Two may fail before the holder gives up its role."""
_GIVE_BACK_S: Final = 2.0
"""The end of the process waits no longer than this."""
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class LeaseHolder:
    """`holds()` tells whether this process may write. `time_text` returns the time in the API server's
    format.
    """

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        identity: str,
        duration_s: float,
        clock: Callable[[], float],
        time_text: Callable[[], str],
        rng: Random,
        owner: Mapping[str, str] | None = None,
    ) -> None:
        """owner: a reference to the object whose deletion deletes the lease. None: the lease stays when the
        last picker has ended.
        """
        self._api = api
        self._path = _LEASES.format(namespace=namespace)
        self._name = name
        self._duration_s = duration_s
        self._clock = clock
        self._time_text = time_text
        self._rng = rng
        self._owners = [owner] if owner is not None else []
        self._election = Election(identity=identity, duration_s=duration_s)
        self._lease: Lease | None = None
        self._held = False
        self._complaint = ""

    def holds(self) -> bool:
        return self._election.holds(now=self._clock())

    async def run(self) -> None:
        """Try for ever to hold the Lease. Releases it when cancelled."""
        try:
            while True:
                await self._try_once()
                pause_s = self._duration_s / _TRIES_IN_TIME
                await asyncio.sleep(pause_s * self._rng.uniform(0.9, 1.1))
        finally:
            await self._give_back()

    async def _try_once(self) -> None:
        try:
            self._lease = await self._read()
            step = self._election.step(self._lease, now=self._clock())
            if step != "wait":
                await self._write(step)
            self._complaint = ""
        except ApiError as error:
            if error.status == 409:  # Another replica was faster.
                self._election.lost()
            elif str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("cannot get lease %s, so this picker writes no status: %s", self._name, error)
        self._log_change()

    async def _read(self) -> Lease | None:
        try:
            answer = await self._api.request("GET", f"{self._path}/{self._name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return read(answer, Lease)

    async def _write(self, step: Step) -> None:
        spec = self._election.spec(step, time_text=self._time_text())
        sent_at = self._clock()
        await self._put(spec, create=step == "create")
        self._election.renewed(sent_at=sent_at)

    async def _put(self, spec: LeaseSpec, *, create: bool) -> None:
        metadata: dict[str, object] = {"name": self._name, "ownerReferences": self._owners}
        if not create:
            assert self._lease is not None, "a lease is read before it is renewed"
            metadata["resourceVersion"] = self._lease.metadata.resource_version
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": msgspec.to_builtins(spec),
        }
        method, path = ("POST", self._path) if create else ("PUT", f"{self._path}/{self._name}")
        self._lease = read(await self._api.request(method, path, body=body), Lease)

    async def _give_back(self) -> None:
        """Release the lease, so that the next holder need not wait until it expires."""
        if not self.holds() or self._lease is None:
            return
        freed = msgspec.structs.replace(self._lease.spec, holder_identity="", lease_duration_seconds=1)
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                await self._put(freed, create=False)
        except (ApiError, TimeoutError) as error:
            _log.warning("cannot release lease %s; it will expire by itself: %s", self._name, error)

    def _log_change(self) -> None:
        held = self.holds()
        if held != self._held:
            self._held = held
            _log.info("this picker %s the status of policies", "writes" if held else "no longer writes")
