"""Decides what the statuses of policies say, and writes the statuses of all objects, which people read with
kubectl.

There is no leader: the first process of each replica compares the statuses with its own results, and writes
the differences. Each write names the version of the object that was read. So if two replicas write at once,
the API server refuses the second write, and its picker then sees that nothing is left to write. A status that
is already right is not written again, so a restart causes no write. The time of a condition is the time when
its `status` last changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from epp.config.policy import only_set
from epp.sources.kube.api import Api, ApiError
from epp.sources.kube.objects import PATH, Condition, LastAccepted, ObjectMeta, PolicyObject, PolicyStatus
from epp.sources.kube.policies import PolicyResult, PolicySet, ResolvedPolicies, Verdict, target

_log = logging.getLogger(__name__)

_MESSAGE_CHARS: Final = 1024
_WRITES_AT_ONCE: Final = 20
"""Most statuses written in one look. The others follow at the next look."""
_AGAIN_S: Final = 5.0
"""The same result is not written to an object again before this time has passed. It bounds the writes if one
fails, if an older CRD drops a field, or if a picker of another release has another result."""


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """A status that differs from the result."""

    path: str
    """The path of the object."""
    result: object
    """The result that the status shows, without times."""
    patch: Mapping[str, Any]

    @property
    def uid(self) -> str:
        return str(self.patch["metadata"]["uid"])


class StatusWriter:
    """Call `look` about once a second."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._tried: dict[str, tuple[object, float]] = {}
        """The last result that was sent, and when, by the uid of the object."""
        self._complaint = ""

    async def look(self, due: Iterable[StatusWrite], *, now: float) -> None:
        """due: all statuses to write, the most important first."""
        self._tried = {uid: tried for uid, tried in self._tried.items() if now - tried[1] < _AGAIN_S}
        fresh = (each for each in due if self._tried.get(each.uid, ("", now))[0] != each.result)
        for each in [*islice(fresh, _WRITES_AT_ONCE)]:
            self._tried[each.uid] = (each.result, now)
            await self._write(each)

    async def _write(self, each: StatusWrite) -> None:
        try:
            await self._api.request("PATCH", f"{each.path}/status", body=each.patch)
        except ApiError as error:
            # 409: the object has changed; the watch will report it. 404: it is gone or has no status.
            if error.status not in (404, 409) and str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("cannot write %s/status and will try again: %s", each.path, error)
            return
        self._complaint = ""


def due(
    outcome: ResolvedPolicies,
    policies: PolicySet,
    *,
    unclaimed: Unclaimed,
    namespace: str,
    time_text: str,
    now: float,
) -> Iterator[StatusWrite]:
    """Yield the statuses to write: first those of policies that route, are in dry run or have a fault; then
    those of policies without a status; then the others; then those of policies that no picker judges.
    """
    path = PATH.format(namespace=namespace)

    def write(found: PolicyObject, wanted: PolicyStatus, result: object) -> StatusWrite:
        return StatusWrite(f"{path}/{found.metadata.name}", result, patch(wanted, found=found))

    judged = [
        (verdict, found)
        for name, verdict in outcome.verdicts.items()
        if (found := policies.found(name)) is not None
    ]
    for verdict, found in sorted(judged, key=lambda each: _turn(*each)):
        wanted = desired(verdict, before=found.status, time_text=time_text)
        if _written_back(wanted) != _written_back(found.status):
            yield write(found, wanted, verdict)
    waiting = {
        (each.metadata.uid, each.metadata.generation): each
        for each in policies.of_other_pools()
        if each.status.observed_generation < each.metadata.generation
    }
    for found in unclaimed.due(waiting, now=now):
        yield write(found, nobodys(found, time_text=time_text), found.metadata.generation)


def _turn(verdict: Verdict, found: PolicyObject) -> int:
    if verdict.accepted.reason == "Invalid" or verdict.programmed.reason in ("Programmed", "DryRun"):
        return 0
    return 2 if found.status.conditions else 1


def desired(verdict: Verdict, *, before: PolicyStatus, time_text: str) -> PolicyStatus:
    """Return the status that the object should have. `before`: its current status."""
    last = verdict.last_accepted
    return PolicyStatus(
        observed_generation=verdict.generation,
        rule=verdict.rule,
        mode=verdict.mode,
        conditions=tuple(
            condition(
                kind, result, generation=verdict.generation, before=before.conditions, time_text=time_text
            )
            for kind, result in (("Accepted", verdict.accepted), ("Programmed", verdict.programmed))
        ),
        # What this version cannot read, a newer one wrote: it stays for the way forward.
        last_accepted=LastAccepted(last.generation, only_set(last.spec)) if last else before.last_accepted,
    )


def condition(
    kind: str, result: PolicyResult, *, generation: int, before: Sequence[Condition], time_text: str
) -> Condition:
    """before: the current conditions of the object."""
    status = "Unknown" if result.so is None else str(result.so)
    same = [c for c in before if c.type == kind and c.status == status and c.last_transition_time]
    return Condition(
        type=kind,
        status=status,
        reason=result.reason,
        message=result.message[:_MESSAGE_CHARS],
        observed_generation=generation,
        last_transition_time=same[0].last_transition_time if same else time_text,
    )


def nobodys(policy: PolicyObject, *, time_text: str) -> PolicyStatus:
    """Return the status of a policy that no picker has judged. It replaces an older status for another
    target.
    """
    result = PolicyResult(
        False,
        "TargetNotFound",
        f"no picker for {' '.join(target(policy)).strip()} has judged this policy; check spec.targetRef, and whether a "
        "gateway with that target runs in this namespace",
    )
    generation, before = policy.metadata.generation, policy.status.conditions
    return PolicyStatus(
        observed_generation=generation,
        conditions=tuple(
            condition(kind, result, generation=generation, before=before, time_text=time_text)
            for kind in ("Accepted", "Programmed")
        ),
    )


def patch(status: PolicyStatus, *, found: PolicyObject) -> Mapping[str, Any]:
    # null deletes the field in a merge patch
    body = dict.fromkeys(PolicyStatus.__struct_encode_fields__) | _replacing(
        msgspec.to_builtins(found.status), msgspec.to_builtins(status)
    )
    return status_patch(body, metadata=found.metadata)


def status_patch(status: Mapping[str, Any], *, metadata: ObjectMeta) -> Mapping[str, Any]:
    """Return the merge patch that gives the object this status. With the uid the patch cannot change another
    object of the same name. With the version it cannot overwrite a newer status.
    """
    return {
        "metadata": {"uid": metadata.uid, "resourceVersion": metadata.resource_version},
        "status": status,
    }


def _replacing(old: Any, new: Any) -> Any:
    """Return `new` with a null for each field that a merge into `old` would keep, at any depth."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    gone = dict.fromkeys(name for name in old if name not in new)
    return gone | {name: _replacing(old.get(name), value) for name, value in new.items()}


class Unclaimed:
    """Finds policies for other pools that no picker judges within `_PATIENCE_S`."""

    _PATIENCE_S: Final = 3.0
    """A picker that serves the pool is faster. One that comes later replaces what is written here."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}
        """By uid and generation: when the policy was first seen without a judgement."""

    def due(self, waiting: Mapping[tuple[str, int], PolicyObject], *, now: float) -> list[PolicyObject]:
        """Return the policies that have waited long enough. waiting: the policies without a judgement, by uid
        and generation.
        """
        self._since = {key: self._since.get(key, now) for key in waiting}
        return [found for key, found in waiting.items() if now - self._since[key] >= self._PATIENCE_S]


def _written_back(status: PolicyStatus) -> PolicyStatus:
    """Return the status without the fields that the CRD of an older release drops; otherwise it would be
    written for ever. These fields change only with the generation.
    """
    return msgspec.structs.replace(status, rule=None, mode=None)
