"""Keeps the InferenceObjectives of one API group, which give a priority to each name that a header may have.

A reflector passes the objects in; `cluster` reads them. If two groups have an objective of the same name, the
newer group's counts: `merged` takes the groups in that order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, get_args

from epp.config.kubernetes import LlmdGroup
from epp.sources.kube.objects import Objective

PATHS: Final[Mapping[str, str]] = {
    group: f"/apis/{group}/v1alpha2/namespaces/{{namespace}}/inferenceobjectives"
    for group in get_args(LlmdGroup)
}
"""Where each API group has its objectives. The newer group is first."""
_MOST: Final = 1024
"""Most objectives of one group. Others are left out."""
_LIMIT: Final = 1000


class Objectives:
    """The objectives of the picker's pools, by name."""

    def __init__(self, *, pools: Collection[str]) -> None:
        self._pools = pools
        self.priorities: dict[str, int] = {}

    def replace(self, objects: Iterable[Objective]) -> None:
        self.priorities.clear()
        for found in objects:
            self.put(found)

    def put(self, found: Objective) -> None:
        self.remove(found)
        if found.spec.pool_ref.name in self._pools and len(self.priorities) < _MOST:
            self.priorities[found.metadata.name] = max(-_LIMIT, min(_LIMIT, found.spec.priority or 0))

    def remove(self, found: Objective) -> None:
        self.priorities.pop(found.metadata.name, None)


def merged(newer_first: Sequence[Objectives]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for objectives in reversed(newer_first):
        found.update(objectives.priorities)
    return found
