"""Decides what the status of a policy says, and when to write it. Pure; `writing` sends the patches.

The parts that a person waits for (conditions, the observed generation, the last accepted spec) are written at
once. Live numbers are written when `interval_s` has passed since the last write. A status that is already
right is not written again, so a change of the Lease holder or a restart causes no write. The time of a
condition is the time when its `status` last changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from epp.config.policy import only_set
from epp.sources.kube.live import Live, ratio_text
from epp.sources.kube.objects import Condition, DryRunState, LastAccepted, PolicyObject, PolicyStatus
from epp.sources.kube.policies import PolicyResult, Verdict, target

_SHORTEST_S: Final = 1.0
"""Least time between two writes to one object, in any case."""
_MOST_SATURATION: Final = 9999.0
_MESSAGE_CHARS: Final = 1024
_NOTHING: Final = PolicyStatus()

T = TypeVar("T")


def desired(
    verdict: Verdict, *, before: PolicyStatus, live: Live, hit_ratio: str | None, time_text: str
) -> PolicyStatus:
    """Return the status that the object should have. `before`: its current status."""
    last = verdict.last_accepted
    counts = verdict.routes or verdict.dry_run  # other policies have no part in these numbers
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
        endpoints=len(live.endpoints) if counts else None,
        ready_endpoints=sum(not e.why_not for e in live.endpoints) if counts else None,
        hit_ratio=hit_ratio if counts else None,
        saturation=_saturation(live) if verdict.routes else None,
        dry_run=(
            DryRunState(live.tried_picks, ratio_text(live.tried_agreed, live.tried_picks))
            if verdict.dry_run
            else None
        ),
        # What this version cannot read, a newer one wrote: it stays for the way forward.
        last_accepted=LastAccepted(last.generation, only_set(last.spec)) if last else before.last_accepted,
    )


def _saturation(live: Live) -> str | None:
    """Return the saturation in the format of the status. None: flow control is off."""
    return None if live.saturation is None else f"{min(live.saturation, _MOST_SATURATION):.2f}"


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


def unclaimed(policy: PolicyObject, *, time_text: str) -> PolicyStatus:
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


def patch(
    status: PolicyStatus, *, before: PolicyStatus = _NOTHING, uid: str, resource_version: str = ""
) -> Mapping[str, Any]:
    """Return the merge patch that turns the status `before` into `status`. With the uid the patch cannot
    change another object of the same name. With the version it cannot overwrite a newer status.
    """
    # null deletes the field in a merge patch
    body = dict.fromkeys(PolicyStatus.__struct_encode_fields__) | _replacing(
        msgspec.to_builtins(before), msgspec.to_builtins(status)
    )
    version = {"resourceVersion": resource_version} if resource_version else {}
    return {"metadata": {"uid": uid, **version}, "status": body}


def _replacing(old: Any, new: Any) -> Any:
    """Return `new` with a null for each field that a merge into `old` would keep, at any depth."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    gone = dict.fromkeys(name for name in old if name not in new)
    return gone | {name: _replacing(old.get(name), value) for name, value in new.items()}


class Unclaimed:
    """Finds objects for other pools that no picker judges within `_PATIENCE_S`."""

    _PATIENCE_S: Final = 3.0
    """A picker that serves the pool is faster. One that comes later replaces what is written here."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}
        """By uid and generation: when the object was first seen without a judgement."""

    def due(self, waiting: Mapping[tuple[str, int], T], *, now: float) -> list[T]:
        """Return the objects that have waited long enough. waiting: the objects without a judgement, by uid
        and generation.
        """
        self._since = {key: self._since.get(key, now) for key in waiting}
        return [found for key, found in waiting.items() if now - self._since[key] >= self._PATIENCE_S]


class WriteTimes:
    """When each object's status was last written, by uid."""

    def __init__(self, *, interval_s: float) -> None:
        self._interval_s = interval_s
        self._written: dict[str, float] = {}

    def due(self, uid: str, *, wanted: PolicyStatus, says: PolicyStatus, now: float) -> bool:
        """Return whether it is time to change a status from `says` to `wanted`."""
        if _written_back(wanted) == _written_back(says):
            return False
        written = self._written.get(uid)
        if written is None:
            return True
        pause_s = self._interval_s if _without_numbers(wanted) == _without_numbers(says) else _SHORTEST_S
        return now - written >= pause_s

    def wrote(self, uid: str, *, now: float) -> None:
        """Record an attempt to write, whether or not it succeeded."""
        self._written[uid] = now

    def keep(self, uids: set[str]) -> None:
        self._written = {uid: at for uid, at in self._written.items() if uid in uids}


def _written_back(status: PolicyStatus) -> PolicyStatus:
    """Return the status without the fields that the CRD of an older release drops; otherwise it would be
    written for ever. These fields change only with the generation.
    """
    return msgspec.structs.replace(status, rule=None, mode=None)


def _without_numbers(status: PolicyStatus) -> PolicyStatus:
    status = _written_back(status)
    return msgspec.structs.replace(
        status, endpoints=None, ready_endpoints=None, hit_ratio=None, saturation=None, dry_run=None
    )
