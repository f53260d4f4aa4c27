"""Reads InferenceObjectives, which give a priority to each name that a header may have, and judges them.

Pure. If two groups have an objective of the same name, the newer group's counts: `merged` and `judge` take
the groups in that order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from epp.config.kubernetes import LlmdGroup
from epp.sources.kube.claims import ACCEPTED, NO_POOL, Claims, Judged
from epp.sources.kube.policies import PolicyResult

PATHS: Final[Mapping[str, str]] = {
    group: f"/apis/{group}/v1alpha2/namespaces/{{namespace}}/inferenceobjectives"
    for group in get_args(LlmdGroup)
}
"""Where each API group has its objectives. The newer group is first."""
_LIMIT: Final = 1000

Objectives = Claims[int]
"""The objectives of one group, with their priorities."""


def objectives_of(*, pools: Collection[str], group: str) -> Objectives:
    return Claims(pools=pools, group=group, path=PATHS[group], read=_priority)


def merged(newer_first: Sequence[Objectives]) -> Mapping[str, int]:
    """Return the priority by the name of the objective."""
    return {claim.name: claim.content for each in reversed(newer_first) for claim in each.claims()}


def judge(newer_first: Sequence[Objectives], *, existing: Collection[str]) -> Iterator[Judged]:
    """Yield the result for each objective of the picker's pools. existing: the pools that exist."""
    owners: dict[str, str] = {}
    for objectives, claim in ((each, claim) for each in newer_first for claim in each.claims()):
        owner = owners.setdefault(claim.name, claim.group)
        if owner != claim.group:
            result = PolicyResult(False, "Conflicted", f"{owner} has an objective of this name, which counts")
        elif claim.pool not in existing:
            result = NO_POOL
        else:
            result = PolicyResult(True, ACCEPTED, f"requests that name it have priority {claim.content}")
        yield objectives, claim, result


def _priority(found: Any, _faults: list[str]) -> int:
    return max(-_LIMIT, min(_LIMIT, found.spec.priority or 0))
