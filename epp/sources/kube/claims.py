"""Keeps the objects of one kind and one API group that name a pool: InferenceModelRewrites and
InferenceObjectives. Says what their status is, and when it is written. Pure: a reflector passes the objects
in, and `writing` sends the patches.

The status has one condition, `Accepted`, as in the CRDs. True: the object is in use. False: the reason says
why not. If no picker judges an object, its condition is Unknown and says that no picker has judged it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import msgspec

from epp.sources.kube.objects import Condition, ModelRewrite, Objective, ObjectMeta
from epp.sources.kube.policies import PolicyResult
from epp.sources.kube.policy_status import Unclaimed, condition
from epp.sources.kube.writing import StatusWrite

_MOST_OBJECTS: Final = 1024
"""Most objects of the picker's pools, and of other pools. Others are left out."""

ACCEPTED: Final = "Accepted"
NO_POOL: Final = PolicyResult(False, "TargetNotFound", "no InferencePool has the name in spec.poolRef.name")

Found = ModelRewrite | Objective
Key = tuple[str, str]
"""API group and name of an object."""
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Claim(Generic[C]):
    """One object."""

    group: str
    metadata: ObjectMeta
    pool: str
    content: C
    """The usable part of the spec."""
    faults: Collection[str]
    """The faults, in words."""
    conditions: tuple[Condition, ...]
    """Its status, as last seen."""

    @property
    def name(self) -> str:
        return self.metadata.name


class Claims(Generic[C]):
    """The objects by name. `version` grows with each change of a spec."""

    def __init__(
        self,
        *,
        pools: Collection[str],
        group: str,
        path: str,
        read: Callable[[Any, list[str]], C],
    ) -> None:
        """path: where the API server has the objects, with a place for the namespace.
        read: returns the usable part of an object, and adds its faults to the list.
        """
        self.group = group
        self.path = path
        self.version = 0
        self._pools = pools
        self._read = read
        self._claims: dict[str, Claim[C]] = {}
        self._of_other_pools: dict[str, Claim[None]] = {}

    def replace(self, objects: Iterable[Found]) -> None:
        before = {*self._claims, *self._of_other_pools}
        for found in objects:
            before.discard(found.metadata.name)
            self.put(found)
        for name in before:
            self._drop(name)

    def put(self, found: Found) -> None:
        """Take a new or changed object. A change of its status alone does not count."""
        if self._seen(found):
            return
        name, pool, conditions = found.metadata.name, found.spec.pool_ref.name, found.status.conditions
        self._drop(name)
        if pool not in self._pools:
            if len(self._of_other_pools) < _MOST_OBJECTS:
                self._of_other_pools[name] = Claim(self.group, found.metadata, pool, None, (), conditions)
        elif len(self._claims) < _MOST_OBJECTS:
            faults = list[str]()
            content = self._read(found, faults)
            self._claims[name] = Claim(self.group, found.metadata, pool, content, faults, conditions)
            self.version += 1

    def remove(self, found: Found) -> None:
        self._drop(found.metadata.name)

    def claims(self) -> list[Claim[C]]:
        """Return the objects of the picker's pools. The oldest goes first. Objects of the same second go by
        name, so that all replicas agree.
        """
        return sorted(
            self._claims.values(), key=lambda claim: (claim.metadata.creation_timestamp, claim.name)
        )

    def of_other_pools(self) -> Collection[Claim[None]]:
        return self._of_other_pools.values()

    def check_integrity(self) -> None:
        assert not self._claims.keys() & self._of_other_pools.keys()
        assert len(self._claims) <= _MOST_OBJECTS
        assert len(self._of_other_pools) <= _MOST_OBJECTS

    def _seen(self, found: Found) -> bool:
        """Take the status of an object whose spec is known. Return False if the spec is new."""
        name, seen = found.metadata.name, found.metadata
        where: dict[str, Any] = self._claims if name in self._claims else self._of_other_pools
        known = where.get(name)
        if known is None or (known.metadata.uid, known.metadata.generation) != (seen.uid, seen.generation):
            return False
        where[name] = replace(known, metadata=seen, conditions=found.status.conditions)
        return True

    def _drop(self, name: str) -> None:
        self._of_other_pools.pop(name, None)
        if self._claims.pop(name, None) is not None:
            self.version += 1


def due(
    newer_first: Sequence[Claims[Any]],
    results: Mapping[Key, PolicyResult],
    *,
    unclaimed: Unclaimed,
    namespace: str,
    time_text: Callable[[], str],
    now: float,
) -> Iterator[StatusWrite]:
    """Yield the statuses to write: those of our pools, then those of objects that no picker judges.
    results: the result for each object of our pools.
    """

    def write(claims: Claims[Any], claim: Claim[Any], wanted: Condition, result: object) -> StatusWrite:
        path = f"{claims.path.format(namespace=namespace)}/{claim.name}"
        return StatusWrite(path, claim.metadata.uid, result, patch(claim, wanted))

    for claims in newer_first:
        for claim in claims.claims():
            result = results[claim.group, claim.name]
            wanted = accepted(result, claim, time_text=time_text())
            if wanted not in claim.conditions:
                yield write(claims, claim, wanted, (claim.metadata.generation, result))
    waiting = {
        (claim.metadata.uid, claim.metadata.generation): (claims, claim)
        for claims in newer_first
        for claim in claims.of_other_pools()
        if observed_generation(claim) < claim.metadata.generation
    }
    for claims, claim in unclaimed.due(waiting, now=now):
        yield write(claims, claim, nobodys(claim, time_text=time_text()), claim.metadata.generation)


def accepted(result: PolicyResult, claim: Claim[Any], *, time_text: str) -> Condition:
    return condition(
        ACCEPTED, result, generation=claim.metadata.generation, before=claim.conditions, time_text=time_text
    )


def nobodys(claim: Claim[Any], *, time_text: str) -> Condition:
    """Return the condition of an object that nobody has judged."""
    pool = f"InferencePool {claim.pool[:253]}" if claim.pool else "spec.poolRef.name"
    message = (
        f"no picker has judged this object for {pool}; check spec.poolRef.name, and whether "
        "a gateway for that pool runs in this namespace and follows objects of this kind"
    )
    return accepted(PolicyResult(None, "TargetNotFound", message), claim, time_text=time_text)


def observed_generation(claim: Claim[Any]) -> int:
    """Return the generation that its status was last judged for. 0: nobody has judged it."""
    return max((c.observed_generation for c in claim.conditions if c.type == ACCEPTED), default=0)


def patch(claim: Claim[Any], wanted: Condition) -> Mapping[str, Any]:
    """Return the condition as a merge patch. It replaces the whole list, so it contains the conditions of
    others and the version at which they were read.
    """
    others = [c for c in claim.conditions if c.type != wanted.type]
    return {
        "metadata": {"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version},
        "status": {"conditions": msgspec.to_builtins([*others, wanted])},
    }
