"""Keeps the objects of one kind and one API group that name a pool: InferenceModelRewrites and
InferenceObjectives. Pure. A reflector passes the objects in; `claim_status` says what their status is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from epp.sources.kube.objects import Condition, ModelRewrite, Objective

_MOST_OBJECTS: Final = 1024
"""Most objects of the picker's pools, and of other pools. Others are left out."""

Found = ModelRewrite | Objective
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Claim(Generic[C]):
    """One object."""

    group: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created: str
    pool: str
    content: C
    """The usable part of the spec."""
    faults: Collection[str]
    """The faults, in words."""
    conditions: tuple[Condition, ...]
    """Its status, as last seen."""


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
        name, faults = found.metadata.name, list[str]()
        self._drop(name)
        if found.spec.pool_ref.name not in self._pools:
            if len(self._of_other_pools) < _MOST_OBJECTS:
                self._of_other_pools[name] = _claim(self.group, found, None, faults)
        elif len(self._claims) < _MOST_OBJECTS:
            self._claims[name] = _claim(self.group, found, self._read(found, faults), faults)
            self.version += 1

    def remove(self, found: Found) -> None:
        self._drop(found.metadata.name)

    def claims(self) -> list[Claim[C]]:
        """Return the objects of the picker's pools. The oldest goes first. Objects of the same second go by
        name, so that all replicas agree.
        """
        return sorted(self._claims.values(), key=lambda claim: (claim.created, claim.name))

    def of_other_pools(self) -> Collection[Claim[None]]:
        return self._of_other_pools.values()

    def check_integrity(self) -> None:
        assert not self._claims.keys() & self._of_other_pools.keys()
        assert len(self._claims) <= _MOST_OBJECTS
        assert len(self._of_other_pools) <= _MOST_OBJECTS

    def _seen(self, found: Found) -> bool:
        """Take the status of an object whose spec is known. Return False if the spec is new."""
        name, conditions = found.metadata.name, found.status.conditions
        known = self._claims.get(name) or self._of_other_pools.get(name)
        if known is None or (known.uid, known.generation) != (found.metadata.uid, found.metadata.generation):
            return False
        seen = replace(known, resource_version=found.metadata.resource_version, conditions=conditions)
        where: dict[str, Any] = self._claims if name in self._claims else self._of_other_pools
        where[name] = seen
        return True

    def _drop(self, name: str) -> None:
        self._of_other_pools.pop(name, None)
        if self._claims.pop(name, None) is not None:
            self.version += 1


def _claim(group: str, found: Found, content: C, faults: Collection[str]) -> Claim[C]:
    metadata = found.metadata
    return Claim(
        group=group,
        name=metadata.name,
        uid=metadata.uid,
        generation=metadata.generation,
        resource_version=metadata.resource_version,
        created=metadata.creation_timestamp,
        pool=found.spec.pool_ref.name,
        content=content,
        faults=faults,
        conditions=found.status.conditions,
    )
