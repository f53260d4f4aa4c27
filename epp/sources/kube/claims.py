"""Keeps the objects of one kind and one API group that name a pool: InferenceModelRewrites and
InferenceObjectives. Says what their status is, and when it is written. Pure: a reflector passes the objects
in, and `writing` sends the patches.

The status has one condition, `Accepted`, as in the CRDs. True: the object is in use. False: the reason says
why not. Objects of other pools keep the condition that their CRD or another picker has given them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import msgspec

from epp.sources.kube.objects import Condition, ModelRewrite, Objective, ObjectMeta
from epp.sources.kube.policies import PolicyResult
from epp.sources.kube.policy_status import condition
from epp.sources.kube.writing import StatusWrite

_MOST_OBJECTS: Final = 1024
"""Most objects of the picker's pools. Others are left out."""

ACCEPTED: Final = "Accepted"
NO_POOL: Final = PolicyResult(False, "TargetNotFound", "no InferencePool has the name in spec.poolRef.name")

Found = ModelRewrite | Objective
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

    def replace(self, objects: Iterable[Found]) -> None:
        before = {*self._claims}
        for found in objects:
            before.discard(found.metadata.name)
            self.put(found)
        for name in before:
            self._drop(name)

    def put(self, found: Found) -> None:
        """Take a new or changed object. A change of its status alone is not a change of a spec."""
        seen, conditions, pool = found.metadata, found.status.conditions, found.spec.pool_ref.name
        known = self._claims.get(seen.name)
        if known and (known.metadata.uid, known.metadata.generation) == (seen.uid, seen.generation):
            self._claims[seen.name] = replace(known, metadata=seen, conditions=conditions)
            return
        self._drop(seen.name)
        if pool in self._pools and len(self._claims) < _MOST_OBJECTS:
            faults = list[str]()
            content = self._read(found, faults)
            self._claims[seen.name] = Claim(self.group, seen, pool, content, faults, conditions)
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

    def check_integrity(self) -> None:
        assert len(self._claims) <= _MOST_OBJECTS

    def _drop(self, name: str) -> None:
        if self._claims.pop(name, None) is not None:
            self.version += 1


Judged = tuple[Claims[Any], Claim[Any], PolicyResult]
"""An object with the objects of its group, and the result for it."""


def due(judged: Iterable[Judged], *, namespace: str, time_text: str) -> Iterator[StatusWrite]:
    """Yield the statuses to write, for objects of our pools and the result for each."""
    for claims, claim, result in judged:
        metadata = claim.metadata
        generation, before = metadata.generation, claim.conditions
        wanted = condition(ACCEPTED, result, generation=generation, before=before, time_text=time_text)
        if wanted not in before:
            path = f"{claims.path.format(namespace=namespace)}/{claim.name}"
            yield StatusWrite(path, metadata.uid, (generation, result), _patch(claim, wanted))


def _patch(claim: Claim[Any], wanted: Condition) -> Mapping[str, Any]:
    """Return the condition as a merge patch. It replaces the whole list, so it contains the conditions of
    others and the version at which they were read.
    """
    others = [c for c in claim.conditions if c.type != wanted.type]
    return {
        "metadata": {"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version},
        "status": {"conditions": msgspec.to_builtins([*others, wanted])},
    }
