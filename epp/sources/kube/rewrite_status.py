"""Decides what the status of an InferenceModelRewrite says: whether its rules are in use. Pure;
`writing` sends the patches.

There is one condition, `Accepted`, as in llm-d's CRD. True: the object is valid, no other object has one of
its names, and its rules are in use. False: the reason says what is wrong; its valid rules are used anyway.
This picker does not judge an object for another pool. If no picker judges the object, its condition is
Unknown and says that no picker has judged it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from epp.sources.kube.objects import Condition
from epp.sources.kube.policies import PolicyResult
from epp.sources.kube.policy_status import Unclaimed, condition
from epp.sources.kube.rewrites import PATHS, ModelRewrites, RewriteClaim
from epp.sources.kube.writing import StatusWrite

_ACCEPTED: Final = "Accepted"
_NAMED: Final = 5

Key = tuple[str, str]
"""API group and name of an object."""


def due(
    newer_first: Sequence[ModelRewrites],
    *,
    existing: Collection[str],
    served: frozenset[str] | None,
    unclaimed: Unclaimed,
    namespace: str,
    time_text: Callable[[], str],
    now: float,
) -> Iterator[StatusWrite]:
    """Yield the statuses to write: those of our pools, then those of objects that no picker judges."""

    def write(claim: RewriteClaim, wanted: Condition, result: object) -> StatusWrite:
        path = f"{PATHS[claim.group].format(namespace=namespace)}/{claim.name}"
        return StatusWrite(path, claim.uid, result, patch(claim, wanted))

    results = judge(newer_first, existing=existing, served=served)
    for rewrites in newer_first:
        for claim in rewrites.claims():
            result = results[claim.group, claim.name]
            wanted = accepted(result, claim, time_text=time_text())
            if wanted not in claim.conditions:
                yield write(claim, wanted, (claim.generation, result))
    waiting = {
        (claim.uid, claim.generation): claim
        for rewrites in newer_first
        for claim in rewrites.of_other_pools()
        if observed_generation(claim) < claim.generation
    }
    for claim in unclaimed.due(waiting, now=now):
        yield write(claim, nobodys(claim, time_text=time_text()), claim.generation)


def judge(
    newer_first: Sequence[ModelRewrites], *, existing: Collection[str], served: frozenset[str] | None
) -> Mapping[Key, PolicyResult]:
    """Return the result for each object of the picker's pools.

    existing: the pools that exist. served: every model that a server lists. None: the lists are not known.
    """
    owners: dict[str, RewriteClaim] = {}
    results = {}
    for rewrites in newer_first:
        for claim in rewrites.claims():
            taken = _taken(claim, owners)
            results[claim.group, claim.name] = _result(claim, taken, pool_exists=claim.pool in existing)
            missing = {t.model for rule in claim.rules for t in rule.targets} - (served or set())
            if served is not None and missing and results[claim.group, claim.name].so:
                results[claim.group, claim.name] = PolicyResult(False, "ModelNotServed", _unserved(missing))
    return results


def _taken(claim: RewriteClaim, owners: dict[str, RewriteClaim]) -> Mapping[str, RewriteClaim]:
    """Return the names of this object that an earlier object has. Its other names now belong to this object.
    The name "" stands for every other name.
    """
    taken = {}
    for rule in claim.rules:
        for model in rule.models or ("",):
            owner = owners.setdefault(model, claim)
            if owner is not claim:
                taken[model] = owner
    return taken


def _result(claim: RewriteClaim, taken: Mapping[str, RewriteClaim], *, pool_exists: bool) -> PolicyResult:
    if claim.faults:
        return PolicyResult(False, "Invalid", "; ".join(claim.faults))
    if taken:
        conflicts = [
            f"{f'model {model[:100]}' if model else 'a rule for all other models'} is in the older rewrite {owner.name}"
            f"{'' if owner.group == claim.group else f' of {owner.group}'}"
            for model, owner in list(taken.items())[:_NAMED]
        ]
        more = f"; and {len(taken) - _NAMED} more" if len(taken) > _NAMED else ""
        return PolicyResult(
            False, "Conflicted", "; ".join(conflicts) + more + "; the other names of this rewrite count"
        )
    if not pool_exists:
        return PolicyResult(False, "TargetNotFound", "no InferencePool has the name in spec.poolRef.name")
    return PolicyResult(True, _ACCEPTED, "its rules are in use")


def _unserved(models: Collection[str]) -> str:
    named = ", ".join(model[:100] for model in sorted(models)[:_NAMED])
    return f"no server lists {named}, so requests that go there get 404"


def accepted(result: PolicyResult, claim: RewriteClaim, *, time_text: str) -> Condition:
    return condition(
        _ACCEPTED, result, generation=claim.generation, before=claim.conditions, time_text=time_text
    )


def nobodys(claim: RewriteClaim, *, time_text: str) -> Condition:
    """Return the condition of an object that nobody has judged."""
    pool = f"InferencePool {claim.pool[:253]}" if claim.pool else "spec.poolRef.name"
    message = (
        f"no picker has judged this rewrite for {pool}; check spec.poolRef.name, and whether "
        "a gateway for that pool runs in this namespace and follows rewrites"
    )
    return accepted(PolicyResult(None, "TargetNotFound", message), claim, time_text=time_text)


def observed_generation(claim: RewriteClaim) -> int:
    """Return the generation that its status was last judged for. 0: nobody has judged it."""
    return max((c.observed_generation for c in claim.conditions if c.type == _ACCEPTED), default=0)


def patch(claim: RewriteClaim, wanted: Condition) -> Mapping[str, Any]:
    """Return the condition as a merge patch. It replaces the whole list, so it contains the conditions of
    others and the version at which they were read.
    """
    others = [c for c in claim.conditions if c.type != wanted.type]
    return {
        "metadata": {"uid": claim.uid, "resourceVersion": claim.resource_version},
        "status": {"conditions": msgspec.to_builtins([*others, wanted])},
    }
