"""Decides whether the rules of each InferenceModelRewrite are in use. Pure.

The result is true if the object is valid, no other object has one of its names, and its rules are in use.
False: the reason says what is wrong; its valid rules are used anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from epp.request.rewriting import Rewrite
from epp.sources.kube.claim_status import ACCEPTED, NO_POOL, Key
from epp.sources.kube.claims import Claim
from epp.sources.kube.policies import PolicyResult
from epp.sources.kube.rewrites import ModelRewrites

_NAMED: Final = 5

RewriteClaim = Claim[Sequence[Rewrite]]


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
            missing = {t.model for rule in claim.content for t in rule.targets} - (served or set())
            if served is not None and missing and results[claim.group, claim.name].so:
                results[claim.group, claim.name] = PolicyResult(False, "ModelNotServed", _unserved(missing))
    return results


def _taken(claim: RewriteClaim, owners: dict[str, RewriteClaim]) -> Mapping[str, RewriteClaim]:
    """Return the names of this object that an earlier object has. Its other names now belong to this object.
    The name "" stands for every other name.
    """
    taken = {}
    for rule in claim.content:
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
        return NO_POOL
    return PolicyResult(True, ACCEPTED, "its rules are in use")


def _unserved(models: Collection[str]) -> str:
    named = ", ".join(model[:100] for model in sorted(models)[:_NAMED])
    return f"no server lists {named}, so requests that go there get 404"
