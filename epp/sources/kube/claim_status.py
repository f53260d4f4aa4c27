"""Says what the status of an InferenceModelRewrite or an InferenceObjective is, and when it is written. Pure;
`writing` sends the patches.

There is one condition, `Accepted`, as in the CRDs. True: the object is in use. False: the reason says why
not. If no picker judges an object, its condition is Unknown and says that no picker has judged it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from epp.sources.kube.claims import Claim, Claims
from epp.sources.kube.objects import Condition
from epp.sources.kube.policies import PolicyResult
from epp.sources.kube.policy_status import Unclaimed, condition
from epp.sources.kube.writing import StatusWrite

ACCEPTED: Final = "Accepted"
NO_POOL: Final = PolicyResult(False, "TargetNotFound", "no InferencePool has the name in spec.poolRef.name")

Key = tuple[str, str]
"""API group and name of an object."""


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
        return StatusWrite(path, claim.uid, result, patch(claim, wanted))

    for claims in newer_first:
        for claim in claims.claims():
            result = results[claim.group, claim.name]
            wanted = accepted(result, claim, time_text=time_text())
            if wanted not in claim.conditions:
                yield write(claims, claim, wanted, (claim.generation, result))
    waiting = {
        (claim.uid, claim.generation): (claims, claim)
        for claims in newer_first
        for claim in claims.of_other_pools()
        if observed_generation(claim) < claim.generation
    }
    for claims, claim in unclaimed.due(waiting, now=now):
        yield write(claims, claim, nobodys(claim, time_text=time_text()), claim.generation)


def accepted(result: PolicyResult, claim: Claim[Any], *, time_text: str) -> Condition:
    return condition(
        ACCEPTED, result, generation=claim.generation, before=claim.conditions, time_text=time_text
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
        "metadata": {"uid": claim.uid, "resourceVersion": claim.resource_version},
        "status": {"conditions": msgspec.to_builtins([*others, wanted])},
    }
