"""Writes the status of policies and the Events of the pools, which people read with kubectl. The module
writes only while the Lease is held. Once a second it compares the results of the policies and the live
numbers with the objects. `policy_status` and `event_budget` decide what to write. A write that fails is tried
again a second later. Called by `cluster`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from epp.config.policy import API_VERSION, KIND
from epp.sources.kube.api import Api, ApiError, read
from epp.sources.kube.crd import PATH
from epp.sources.kube.event_budget import EndpointChanges, EventBudget, EventText, Written
from epp.sources.kube.live import HitRatio, Live
from epp.sources.kube.objects import PolicyObject, PolicyStatus
from epp.sources.kube.policies import ResolvedPolicies, Verdict
from epp.sources.kube.policy_status import Unclaimed, WriteTimes, desired, patch, unclaimed

_log = logging.getLogger(__name__)

_WRITES_AT_ONCE: Final = 20
"""Most statuses written in one look. The others follow at the next look. `_turn` gives their order."""
_EVENTS: Final = "/api/v1/namespaces/{namespace}/events"


class Writer:
    """Call `look` once a second. `on_written` gets each policy object after its write. Events are written
    under `identity`.
    """

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        pools: Sequence[str],
        identity: str,
        interval_s: float,
        events: bool,
        on_written: Callable[[PolicyObject], None],
        time_text: Callable[[], str],
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._identity = identity
        self._events = events
        self._on_written = on_written
        self._time_text = time_text
        self._times = WriteTimes(interval_s=interval_s)
        self._unclaimed = Unclaimed()
        self._event_budget = EventBudget()
        self._endpoint_changes = {pool: EndpointChanges(pool=pool) for pool in pools}
        self._hit_ratio = HitRatio()
        self._complaint = ""

    async def look(
        self,
        outcome: ResolvedPolicies,
        *,
        says: Mapping[str, PolicyStatus],
        of_other_pools: Collection[PolicyObject] = (),
        live: Live,
        pool_uids: Mapping[str, str],
        holds: Callable[[], bool],
        now: float,
    ) -> None:
        """Write what is due.

        says: the current status of each policy object;
        of_other_pools: policies of the namespace for other pools;
        pool_uids: the uid of each pool by name, empty if it does not exist;
        holds: whether the Lease is held. Called before each write, because writes to a slow API server can
        take longer than the Lease lasts.
        """
        self._hit_ratio.observe(live.endpoints, now=now)
        texts = [
            text
            for pool, changes in self._endpoint_changes.items()
            for text in changes.look({e.name: e.why_not for e in live.endpoints if e.pool == pool})
        ]
        if holds():
            texts += await self._write_due(outcome, says=says, live=live, holds=holds, now=now)
            await self._write_unclaimed(of_other_pools, holds=holds, now=now)
        for text in texts:
            if holds():
                await self._write_event(text, pool_uid=pool_uids.get(text.pool, ""), now=now)

    def check_integrity(self) -> None:
        self._event_budget.check_integrity()
        self._hit_ratio.check_integrity()
        for changes in self._endpoint_changes.values():
            changes.check_integrity()

    async def _write_due(
        self,
        outcome: ResolvedPolicies,
        *,
        says: Mapping[str, PolicyStatus],
        live: Live,
        holds: Callable[[], bool],
        now: float,
    ) -> list[EventText]:
        """Write the statuses that have changed. Returns their news about the pools."""
        self._times.keep({verdict.uid for verdict in outcome.verdicts.values()})
        texts: list[EventText] = []
        written = 0
        for name, verdict in sorted(
            outcome.verdicts.items(), key=lambda each: _turn(each[1], says.get(each[0]))
        ):
            before = says.get(name) or PolicyStatus()
            wanted = desired(
                verdict,
                before=before,
                live=live,
                hit_ratio=self._hit_ratio.text(now=now),
                time_text=self._time_text(),
            )
            if not self._times.due(verdict.uid, wanted=wanted, says=before, now=now):
                continue
            if written == _WRITES_AT_ONCE or not holds():
                break
            written += 1
            self._times.wrote(verdict.uid, now=now)
            if await self._write(name, wanted, before=before, uid=verdict.uid):
                texts += _news(name, verdict, before=before)
        return texts

    async def _write_unclaimed(
        self, of_other_pools: Collection[PolicyObject], *, holds: Callable[[], bool], now: float
    ) -> None:
        """Mark policies that nobody judges. If two holders write the same, the second write is refused."""
        waiting = {
            (each.metadata.uid, each.metadata.generation): each
            for each in of_other_pools
            if each.status.observed_generation < each.metadata.generation
        }
        for policy in self._unclaimed.due(waiting, now=now)[:_WRITES_AT_ONCE]:
            if holds():
                wanted, found = unclaimed(policy, time_text=self._time_text()), policy.metadata
                await self._write(
                    found.name,
                    wanted,
                    before=policy.status,
                    uid=found.uid,
                    resource_version=found.resource_version,
                )

    async def _write(
        self, name: str, wanted: PolicyStatus, *, before: PolicyStatus, uid: str, resource_version: str = ""
    ) -> bool:
        path = f"{PATH.format(namespace=self._namespace)}/{name}/status"
        body = patch(wanted, before=before, uid=uid, resource_version=resource_version)
        try:
            self._on_written(read(await self._api.request("PATCH", path, body=body), PolicyObject))
        except ApiError as error:
            # 404: the object is gone. 409: another object has its name now. The watch will report both.
            if error.status not in (404, 409):
                self._complain(f"status of policy {name}", error)
            return False
        self._complaint = ""
        return True

    async def _write_event(self, text: EventText, *, pool_uid: str, now: float) -> None:
        if not self._events:
            return
        event = self._event_budget.offer(text, now=now, time_text=self._time_text())
        if event is None:
            _log.warning("too many Events; this Event was not written: %s: %s", text.reason, text.message)
            return
        path = _EVENTS.format(namespace=self._namespace)
        try:
            for name, regarding in self._regarding(event, pool_uid=pool_uid).items():
                if event.count == 1:
                    await self._api.request("POST", path, body=self._event(event, name, regarding))
                else:
                    again = {"count": event.count, "lastTimestamp": self._time_text()}
                    await self._api.request("PATCH", f"{path}/{name}", body=again)
        except ApiError as error:
            self._event_budget.forget(event)
            self._complain("an Event", error)

    def _regarding(self, event: Written, *, pool_uid: str) -> Mapping[str, Mapping[str, str]]:
        """Return the object that each Event to write is about: the pool and the policy that the text names.
        The keys are names of Events that only this process uses, since these names must be unique.
        """
        text = event.text
        about = (text.pool or text.policy)[:200].rstrip("-.")
        name = f"{about}.{self._identity[-8:]}.{event.name}"
        pool = {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "namespace": self._namespace,
            "name": text.pool,
        }
        found = {name: pool | ({"uid": pool_uid} if pool_uid else {})} if text.pool else {}
        if text.policy:
            found[f"{name}.policy"] = {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": self._namespace,
                "name": text.policy,
                "uid": text.policy_uid,
            }
        return found

    def _event(self, event: Written, name: str, regarding: Mapping[str, str]) -> Mapping[str, Any]:
        text = event.text
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": self._namespace},
            "involvedObject": regarding,
            "reason": text.reason,
            "message": text.message,
            "type": text.kind,
            "count": event.count,
            "firstTimestamp": event.first_time,
            "lastTimestamp": event.first_time,
            "source": {"component": "prefix-gateway-epp"},
            "reportingComponent": "prefix-gateway.dev/epp",
            "reportingInstance": self._identity,
        }

    def _complain(self, what: str, error: ApiError) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            _log.error("cannot write %s and will try again: %s", what, error)


def _turn(verdict: Verdict, says: PolicyStatus | None) -> int:
    """Return the sort key: first policies that route, are in dry run or have a fault; then policies without a
    status; then the others.
    """
    if verdict.routes or verdict.dry_run or verdict.accepted.reason == "Invalid":
        return 0
    return 1 if says is None or not says.conditions else 2


def _news(name: str, verdict: Verdict, *, before: PolicyStatus) -> list[EventText]:
    """Return the Events about the change to this status."""
    written = [(c.type, c.status, c.reason, c.observed_generation) for c in before.conditions]

    def new(kind: str, reason: str, *, so: bool) -> bool:
        return (kind, str(so), reason, verdict.generation) not in written

    accepted, programmed = verdict.accepted, verdict.programmed
    what = f"policy {name}, generation {verdict.generation}"
    if not accepted.so and new("Accepted", accepted.reason, so=False):
        text = f"{what}: {accepted.message}; {programmed.message}"
        return [EventText("PolicyRefused", text, "Warning", verdict.pool, name, verdict.uid)]
    if programmed.so and new("Programmed", programmed.reason, so=True):
        text = f"{what}: {programmed.message}"
        return [EventText("PolicyApplied", text, "Normal", verdict.pool, name, verdict.uid)]
    return []
