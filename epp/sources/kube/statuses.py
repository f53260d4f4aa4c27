"""Writes the statuses of policies, objectives and rewrites, which people read with kubectl.

There is no leader: the first process of each replica compares the statuses with its own results, and writes
the differences. Each write names the version of the object that was read. So if two replicas write at once,
the API server refuses the second write, and its picker then sees that nothing is left to write. A status that
is already right is not written again, so a restart causes no write. The time of a condition is the time when
its `status` last changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from epp.sources.kube.api import Api, ApiError
from epp.sources.kube.claims import Wanted
from epp.sources.kube.objects import ClaimStatus, PolicyStatus

Status: TypeAlias = PolicyStatus | ClaimStatus

_log = logging.getLogger(__name__)

_WRITES_AT_ONCE: Final = 20
"""Most statuses written in one look. The others follow at the next look."""
_AGAIN_S: Final = 5.0
"""The same result is not written to an object again before this time has passed. It bounds the writes if one
fails, if an older CRD drops a field, or if a picker of another release has another result."""
_FIRST: Final = frozenset({"Invalid", "Programmed", "DryRun"})
"""Objects with one of these reasons are written first, then those without a status."""


class StatusWriter:
    """Call `look` about once a second."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._tried: dict[str, tuple[object, float]] = {}
        """The last status that was sent, and when, by the uid of the object."""
        self._since: dict[tuple[str, int], float] = {}
        """By uid and generation: since when a status is wanted that may come from another picker."""
        self._complaint = ""

    async def look(self, wanted: Iterable[Wanted], *, now: float, time_text: str) -> None:
        """wanted: the statuses that all objects should have."""
        self._tried = {uid: tried for uid, tried in self._tried.items() if now - tried[1] < _AGAIN_S}
        since: dict[tuple[str, int], float] = {}
        due: list[tuple[Wanted, Status]] = []
        for each in wanted:
            seen, status = each.claim.metadata, _complete(each, time_text=time_text)
            if _written_back(status) == _written_back(each.claim.status):
                continue
            key = seen.uid, seen.generation
            since[key] = self._since.get(key, now)
            if now - since[key] >= each.after_s and self._tried.get(seen.uid, ("", now))[0] != each.status:
                due.append((each, status))
        self._since = since
        for each, status in sorted(due, key=lambda one: _turn(one[0]))[:_WRITES_AT_ONCE]:
            self._tried[each.claim.metadata.uid] = (each.status, now)
            await self._write(each, status)

    async def _write(self, each: Wanted, status: Status) -> None:
        try:
            await self._api.request("PATCH", f"{each.claim.path}/status", body=_patch(each, status))
        except ApiError as error:
            # 409: the object has changed; the watch will report it. 404: it is gone or has no status.
            if error.status not in (404, 409) and str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("cannot write %s/status and will try again: %s", each.claim.path, error)
            return
        self._complaint = ""


def _turn(each: Wanted) -> int:
    if any(one.reason in _FIRST for one in each.status.conditions):
        return 0
    return 2 if each.claim.status.conditions else 1


def _complete(each: Wanted, *, time_text: str) -> Status:
    """Return the status with its times, and with what others wrote there. A condition whose `status` has not
    changed keeps its time.
    """
    before: Status = each.claim.status
    times = {(one.type, one.status): one.last_transition_time for one in before.conditions}
    fresh = {
        one.type: replace(one, last_transition_time=times.get((one.type, one.status)) or time_text)
        for one in each.status.conditions
    }
    others = [fresh.pop(one.type, one) for one in before.conditions]
    status = replace(each.status, conditions=(*others, *fresh.values()))
    if isinstance(status, PolicyStatus) and status.last_accepted is None:
        # What this version cannot read, a newer one wrote: it stays for the way forward.
        status = replace(status, last_accepted=each.claim.status.last_accepted)
    return status


def _written_back(status: Status) -> Status:
    """Return the status without the fields that the CRD of an older release drops; otherwise it would be
    written for ever. These fields change only with the generation.
    """
    return replace(status, rule=None, mode=None) if isinstance(status, PolicyStatus) else status


def _patch(each: Wanted, status: Status) -> Mapping[str, Any]:
    """Return the merge patch that gives the object this status. With the uid the patch cannot change another
    object of the same name. With the version it cannot overwrite a newer status.
    """
    # null deletes the field in a merge patch. A field that cannot be read is deleted too.
    cleared = dict.fromkeys(type(status).__struct_encode_fields__)
    changed = _replacing(msgspec.to_builtins(each.claim.status), msgspec.to_builtins(status))
    metadata = each.claim.metadata
    return {
        "metadata": {"uid": metadata.uid, "resourceVersion": metadata.resource_version},
        "status": cleared | changed,
    }


def _replacing(old: Any, new: Any) -> Any:
    """Return `new` with a null for each field that a merge into `old` would keep, at any depth."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    gone = dict.fromkeys(name for name in old if name not in new)
    return gone | {name: _replacing(old.get(name), value) for name, value in new.items()}
