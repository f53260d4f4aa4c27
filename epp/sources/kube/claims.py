"""Keeps the objects of one kind whose status the picker writes: policies, objectives, rewrites.

Pure: a reflector passes the objects in, a judge says which status each should have, and `statuses` writes it.
Only a change of the spec (`generation`) counts as a change. Writes of status, including the picker's own,
have no effect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from epp.sources.kube.objects import ClaimStatus, Condition, ObjectMeta, PolicyStatus

ACCEPTED: Final = "Accepted"
_MESSAGE_CHARS: Final = 1024

C = TypeVar("C")


@dataclass(slots=True)
class Claim(Generic[C]):
    """One object: metadata and status as last seen, and what counts of its spec."""

    path: str
    metadata: ObjectMeta
    status: Any
    content: C

    @property
    def name(self) -> str:
        return self.metadata.name


@dataclass(frozen=True, slots=True)
class Wanted:
    """The status that an object should have, without times."""

    claim: Claim[Any]
    status: PolicyStatus | ClaimStatus
    after_s: float = 0.0
    """It is written if it is still wanted after this time."""


def condition(kind: str, reason: str, message: str, *, generation: int) -> Condition:
    """Return a condition without a time. It is true if the reason is its own name."""
    return Condition(kind, str(reason == kind), reason, message[:_MESSAGE_CHARS], generation)


class Claims(Generic[C]):
    """The objects by name. `changed` is true from a change of a spec until the objects have been judged."""

    def __init__(
        self,
        what: str,
        *,
        kind: type[Any],
        path: str,
        read: Callable[[Any, C | None], C | None],
        most: int = sys.maxsize,
    ) -> None:
        """what: their name for logs and metrics. kind: the struct of an object.
        path: where the API server has the objects.
        read: returns what counts of an object, or None if it is not for this picker. It gets what counted of
        the object until now.
        most: most objects. Others are left out.
        """
        self.what = what
        self.kind = kind
        self.path = path
        self.changed = False
        self._read = read
        self._most = most
        self._claims: dict[str, Claim[C]] = {}

    def replace(self, objects: Iterable[Any]) -> None:
        before = {*self._claims}
        for found in objects:
            before.discard(found.metadata.name)
            self.put(found)
        for name in before:
            self._drop(name)

    def put(self, found: Any) -> None:
        """Take a new or changed object. A change of its status alone is not a change of a spec."""
        seen = found.metadata
        known = self._claims.get(seen.name)
        same = known is not None and known.metadata.uid == seen.uid
        if known is not None and same and known.metadata.generation == seen.generation:
            known.metadata, known.status = seen, found.status
            return
        self._drop(seen.name)
        content = self._read(found, known.content if known is not None and same else None)
        if content is not None and len(self._claims) < self._most:
            self._claims[seen.name] = Claim(f"{self.path}/{seen.name}", seen, found.status, content)
            self.changed = True

    def remove(self, found: Any) -> None:
        self._drop(found.metadata.name)

    def oldest_first(self) -> list[Claim[C]]:
        """Return the objects by age. Objects of the same second go by name, so that all replicas agree."""
        return sorted(self._claims.values(), key=lambda each: (each.metadata.creation_timestamp, each.name))

    def take_change(self) -> bool:
        """Return whether a spec has changed since the last call."""
        changed, self.changed = self.changed, False
        return changed

    def check_integrity(self) -> None:
        assert len(self._claims) <= self._most
        assert all(name == each.name for name, each in self._claims.items())

    def _drop(self, name: str) -> None:
        if self._claims.pop(name, None) is not None:
            self.changed = True
