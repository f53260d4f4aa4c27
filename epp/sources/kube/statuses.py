"""Keeps the objects whose status the picker writes, and writes the statuses, which people read with kubectl.

Reflectors keep policies, objectives and rewrites, and a judge says which status each should have. Only a
change of the spec (`generation`) counts as a change. Writes of status, including the picker's own, have no
effect.

There is no leader: the first process of each replica compares the statuses with its own results, and writes
the differences. Each write names the version of the object that was read. So if two replicas write at once,
the API server refuses the second write, and its picker then sees that nothing is left to write. A status that
is already right is not written again, so a restart causes no write. The time of a condition is the time when
its `status` last changed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from epp.sources.kube.api import Api, ApiError
from epp.sources.kube.objects import ClaimStatus, Condition, ObjectMeta, PolicyStatus
from epp.sources.kube.reflector import Collection

_log = logging.getLogger(__name__)

ACCEPTED: Final = "Accepted"
_MESSAGE_CHARS: Final = 1024
_WRITES_AT_ONCE: Final = 20
"""Most statuses written in one look. The others follow at the next look, those tried last at the end."""
_AGAIN_S: Final = (5.0, 60.0)
"""The first and the longest pause before the same result is written to an object again; each is twice as long
as the last. They bound the writes if one fails, if an older CRD drops a field, or if a picker of another
release has another result."""

C = TypeVar("C")
Status: TypeAlias = PolicyStatus | ClaimStatus


@dataclass(slots=True, eq=False)
class Claim(Generic[C]):
    """One object: metadata and status as last seen, and what counts of its spec."""

    path: str
    metadata: ObjectMeta
    status: Any
    content: C
    wanted: Status | None = None
    """The status that the object should have, as of the last look, without times."""
    write_at: float = 0.0
    """From when on it may be written."""
    pause_s: float = _AGAIN_S[0]
    """The pause after that."""

    @property
    def name(self) -> str:
        return self.metadata.name


@dataclass(frozen=True, slots=True)
class Wanted:
    """The status that an object should have, without times."""

    claim: Claim[Any]
    status: Status
    after_s: float = 0.0
    """It is written if it is still wanted after this time."""


def condition(kind: str, reason: str, message: str, *, generation: int) -> Condition:
    """Return a condition without a time. It is true if the reason is its own name."""
    return Condition(kind, str(reason == kind), reason, message[:_MESSAGE_CHARS], generation)


_MOST: Final = 1024
"""Most objects of one kind that count, since each has its judgement and its status."""

Claims: TypeAlias = Collection[Any, Claim[C]]
"""The objects whose status the picker writes."""


def claims_at(
    what: str, kind: type[Any], path: str, *, content: Callable[[Any, C | None], C | None]
) -> Claims[C]:
    """Return the objects at this path. A change of a status alone changes nothing that counts.

    content: returns what counts of an object's spec, or None if the object is not for this picker. It gets
    what counted of the object until now.
    """

    def read(found: Any, known: Claim[C] | None) -> Claim[C] | None:
        seen = found.metadata
        if known is not None and known.metadata.uid != seen.uid:
            known = None  # another object of the same name
        if known is not None and known.metadata.generation == seen.generation:
            known.metadata, known.status = seen, found.status
            return known
        counts = content(found, known.content if known is not None else None)
        return Claim(f"{path}/{seen.name}", seen, found.status, counts) if counts is not None else None

    return Collection(what, kind, path, read=read, most=_MOST)


def oldest_first(claims: Claims[C]) -> list[Claim[C]]:
    """Return the objects by age. Objects of the same second go by name, so that all replicas agree."""
    return sorted(claims.found.values(), key=lambda each: (each.metadata.creation_timestamp, each.name))


class StatusWriter:
    """Call `look` about once a second."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._complaint = ""

    async def look(self, wanted: Sequence[Wanted], *, now: float, time_text: str) -> None:
        """wanted: the statuses that all objects should have."""
        due: list[tuple[Claim[Any], Status]] = []
        for each in wanted:
            claim, status = each.claim, _complete(each, time_text=time_text)
            if status != claim.status and claim.wanted != each.status:
                claim.wanted, claim.write_at, claim.pause_s = each.status, now + each.after_s, _AGAIN_S[0]
            if status != claim.status and now >= claim.write_at:
                due.append((claim, status))
        for claim, status in sorted(due, key=lambda one: one[0].write_at)[:_WRITES_AT_ONCE]:
            claim.write_at, claim.pause_s = now + claim.pause_s, min(2 * claim.pause_s, _AGAIN_S[1])
            await self._write(claim, status)

    async def _write(self, claim: Claim[Any], status: Status) -> None:
        try:
            await self._api.request("PATCH", f"{claim.path}/status", body=_patch(claim, status))
        except ApiError as error:
            # 409: the object has changed; the watch will report it. 404: it is gone or has no status.
            if error.status not in (404, 409) and str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("cannot write %s/status and will try again: %s", claim.path, error)
            return
        self._complaint = ""


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
    return replace(each.status, conditions=(*others, *fresh.values()))


def _patch(claim: Claim[Any], status: Status) -> Mapping[str, Any]:
    """Return the merge patch that gives the object this status. With the uid the patch cannot change another
    object of the same name. With the version it cannot overwrite a newer status.
    """
    # null deletes the field in a merge patch. A field that cannot be read is deleted too.
    cleared = dict.fromkeys(type(status).__struct_encode_fields__)
    changed = _replacing(msgspec.to_builtins(claim.status), msgspec.to_builtins(status))
    return {
        "metadata": {"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version},
        "status": cleared | changed,
    }


def _replacing(old: Any, new: Any) -> Any:
    """Return `new` with a null for each field that a merge into `old` would keep, at any depth."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    gone = dict.fromkeys(name for name in old if name not in new)
    return gone | {name: _replacing(old.get(name), value) for name, value in new.items()}
