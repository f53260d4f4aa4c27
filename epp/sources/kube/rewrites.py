"""Reads InferenceModelRewrites, which give other names to models. Pure.

The oldest object goes first. If two rules have the same name, the first rule counts. Weights should be set
for all targets of a rule or for none; a missing weight counts as 1. A target without a name is left out.
Everything that is left out is a fault of the object, which its status shows. If a picker has several pools, a
rule for every other name is left out, because it would take the names of the other pools' models.

`judge` says whether the rules of each object are in use. The result is true if the object is valid, no other
object has one of its names, and its rules are in use. False: the reason says what is wrong; its valid rules
are used anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Final, get_args

from epp.config.kubernetes import LlmdGroup
from epp.request.client_names import MAX_NAME_CHARS
from epp.request.rewriting import Rewrite, Rewrites, RewriteTarget
from epp.sources.kube.claims import ACCEPTED, NO_POOL, Claim, Claims, Judged
from epp.sources.kube.objects import ModelRewrite, RewriteRule
from epp.sources.kube.policies import PolicyResult

PATHS: Final[Mapping[str, str]] = {
    group: f"/apis/{group}/v1alpha2/namespaces/{{namespace}}/inferencemodelrewrites"
    for group in get_args(LlmdGroup)
}
"""Where each API group has its rewrites. The newer group is first."""
_MOST_RULES: Final = 1024
"""Most rules of one object."""
_MOST_NAMES: Final = 1024
"""Most names of one rule: models that it matches, and targets."""
_MOST_IN_ALL: Final = 16_384
"""Most names in all rules of one group, since each change of an object makes a new index of all of them. The
newest objects are left out."""
_MOST_WEIGHT: Final = 1_000_000
_NO_MATCHES: Final = ".matches is empty, and the picker has several pools; name the models, since the rule would take those of other pools"
_NAMED: Final = 5
"""Most names in one message."""
_MOST_FAULTS: Final = 5
"""Most faults that are reported for one object."""


RewriteClaim = Claim[Sequence[Rewrite]]
ModelRewrites = Claims[Sequence[Rewrite]]
"""The rewrites of one group, with their usable rules."""


def model_rewrites(*, pools: Collection[str], group: str) -> ModelRewrites:
    return Claims(
        pools=pools, group=group, path=PATHS[group], read=partial(_rules, catches_all=len(pools) == 1)
    )


def rules_of(rewrites: ModelRewrites) -> list[Rewrite]:
    rules = [rule for claim in rewrites.claims() for rule in claim.content]
    names = list(accumulate(len(rule.models) + len(rule.targets) for rule in rules))
    return rules[: bisect_right(names, _MOST_IN_ALL)]


def all_rewrites(newer_first: Sequence[ModelRewrites]) -> Rewrites:
    return Rewrites(rule for rewrites in newer_first for rule in rules_of(rewrites))


def _rules(found: ModelRewrite, faults: list[str], *, catches_all: bool) -> Sequence[Rewrite]:
    """Return the usable rules of the object. The faults of the others are added to `faults`.
    catches_all: whether a rule may be for every other name.
    """
    all_rules, rules = found.spec.rules, []
    if not all_rules:
        faults.append("spec.rules is empty")
    for number, rule in enumerate(all_rules[:_MOST_RULES]):
        models = tuple(
            match.model.value
            for match in rule.matches[:_MOST_NAMES]
            if 0 < len(match.model.value) <= MAX_NAME_CHARS
        )
        targets = tuple(
            RewriteTarget(target.model_rewrite, max(1, min(_MOST_WEIGHT, target.weight or 1)))
            for target in rule.targets[:_MOST_NAMES]
            if 0 < len(target.model_rewrite) <= MAX_NAME_CHARS
        )
        if not rule.matches and not catches_all:
            faults.append(f"spec.rules[{number}]{_NO_MATCHES}")
        elif targets and (models or not rule.matches):
            rules.append(Rewrite(models, targets))
        if len(faults) < _MOST_FAULTS:
            faults += [f"spec.rules[{number}]{fault}" for fault in _faults(rule, models, targets)]
    if len(all_rules) > _MOST_RULES:
        faults.append(f"spec.rules has more than {_MOST_RULES} rules; the others are left out")
    return rules


def _faults(rule: RewriteRule, models: Sequence[str], targets: Sequence[RewriteTarget]) -> Iterable[str]:
    """Yield the faults of one rule; `models` and `targets` are its usable names and targets."""
    if len(models) < len(rule.matches):
        yield f".matches: only {len(models)} of {len(rule.matches)} entries name a model (at most {_MOST_NAMES} count)"
    if not targets:
        yield f".targets: no modelRewrite of 1 to {MAX_NAME_CHARS} characters, so the rule is left out"
    elif len(targets) < len(rule.targets):
        yield (
            f".targets: only {len(targets)} of {len(rule.targets)} have a modelRewrite of 1 to {MAX_NAME_CHARS} "
            f"characters (at most {_MOST_NAMES} count)"
        )
    weighted = sum(target.weight is not None for target in rule.targets)
    if 0 < weighted < len(rule.targets):
        yield ".targets: some have a weight and some have none; a missing weight counts as 1"


def judge(
    newer_first: Sequence[ModelRewrites], *, existing: Collection[str], served: frozenset[str] | None
) -> Iterator[Judged]:
    """Yield the result for each object of the picker's pools.

    existing: the pools that exist. served: every model that a server lists. None: the lists are not known.
    """
    owners: dict[str, RewriteClaim] = {}
    for rewrites in newer_first:
        for claim in rewrites.claims():
            result = _result(claim, _taken(claim, owners), pool_exists=claim.pool in existing)
            missing = {t.model for rule in claim.content for t in rule.targets} - (served or set())
            if served is not None and missing and result.so:
                result = PolicyResult(False, "ModelNotServed", _unserved(missing))
            yield rewrites, claim, result


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
