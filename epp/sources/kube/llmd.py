"""Judges llm-d's objects that name a pool of the picker: InferenceObjectives, which give a priority to each
name that a header may have, and InferenceModelRewrites, which give other names to models. Pure.

The oldest object goes first, and the newer API group before the older: the first of two objectives of one
name, and the first of two rules for one model, counts. A missing weight counts as 1. A target without a name
is left out. If a picker has several pools, a rule for every other name is left out, because it would take the
names of the other pools' models.

The status has one condition, `Accepted`, as in the CRDs. True: the object is in use. False: the reason says
what is wrong; the valid rules of a rewrite are used anyway. Objects of other pools keep the condition that
their CRD or another picker has given them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, get_args

from epp.config.sections import LlmdGroup
from epp.request.client_names import MAX_NAME_CHARS
from epp.request.rewriting import Rewrite, Rewrites, RewriteTarget
from epp.sources.kube.objects import ClaimStatus, ModelRewrite, Objective
from epp.sources.kube.statuses import ACCEPTED, C, Claim, Claims, Wanted, claims_at, condition, oldest_first

_MOST: Final = 1024
"""Most rules of one object, and names and targets of one rule. Others are left out."""
_MOST_IN_ALL: Final = 16_384
"""Most names in all rules, since each change of an object makes a new index of them. The newest objects are
left out."""
_MOST_WEIGHT: Final = 1_000_000
_NAMED: Final = 5
"""Most names in one message, and most faults that are reported for one object."""
_MOST_PRIORITY: Final = 1000

GROUPS: Final[Sequence[LlmdGroup]] = get_args(LlmdGroup)
"""The API groups of both kinds. The newer group is first."""


@dataclass(frozen=True, slots=True)
class Usable(Generic[C]):
    """What can be used of one object."""

    group: str
    pool: str
    value: C
    faults: Sequence[str]
    """The faults of the rest, in words."""


Objectives = Claims[Usable[int]]
"""The objectives of one group, with their priorities."""
ModelRewrites = Claims[Usable[Sequence[Rewrite]]]
"""The rewrites of one group, with their usable rules."""


def objectives_in(
    groups: Collection[LlmdGroup], *, pools: Collection[str], namespace: str = ""
) -> list[Objectives]:
    def read(found: Any) -> tuple[int, Sequence[str]]:
        return max(-_MOST_PRIORITY, min(_MOST_PRIORITY, found.spec.priority or 0)), ()

    path = f"namespaces/{namespace}/inferenceobjectives"
    return _sets("objectives", Objective, path, groups, pools=pools, read=read)


def rewrites_in(
    groups: Collection[LlmdGroup], *, pools: Collection[str], namespace: str = ""
) -> list[ModelRewrites]:
    read = partial(_rules, catches_all=len(pools) == 1)
    path = f"namespaces/{namespace}/inferencemodelrewrites"
    return _sets("rewrites", ModelRewrite, path, groups, pools=pools, read=read)


def _sets(
    what: str,
    kind: type[Any],
    path: str,
    groups: Collection[LlmdGroup],
    *,
    pools: Collection[str],
    read: Callable[[Any], tuple[C, Sequence[str]]],
) -> list[Claims[Usable[C]]]:
    """Return the objects of each group, the newer group first. read: returns value and faults of one."""

    def content(group: str, found: Any, _: Usable[C] | None) -> Usable[C] | None:
        pool = found.spec.pool_ref.name
        return Usable(group, pool, *read(found)) if pool in pools else None

    return [
        claims_at(f"{what} of {g}", kind, f"/apis/{g}/v1alpha2/{path}", content=partial(content, g))
        for g in GROUPS
        if g in groups
    ]


def _in_order(newer_first: Sequence[Claims[C]]) -> list[Claim[C]]:
    """Return the objects of all groups in the order in which they count."""
    return [claim for each in newer_first for claim in oldest_first(each)]


def merged(newer_first: Sequence[Objectives]) -> Mapping[str, int]:
    """Return the priority by the name of the objective."""
    return {claim.name: claim.content.value for claim in reversed(_in_order(newer_first))}


def all_rewrites(newer_first: Sequence[ModelRewrites]) -> Rewrites:
    return Rewrites([rule for _, rules in _in_use(newer_first) for rule in rules])


def _in_use(
    newer_first: Sequence[ModelRewrites],
) -> Iterator[tuple[Claim[Usable[Sequence[Rewrite]]], Sequence[Rewrite]]]:
    """Yield each object with those of its rules for whose names there is room."""
    room = _MOST_IN_ALL
    for claim in _in_order(newer_first):
        rules: list[Rewrite] = []
        for rule in claim.content.value:
            room -= len(rule.models) + len(rule.targets)
            if room < 0:
                break
            rules.append(rule)
        yield claim, rules


def _rules(found: ModelRewrite, *, catches_all: bool) -> tuple[Sequence[Rewrite], Sequence[str]]:
    """Return the usable rules of the object, and the faults of the others.
    catches_all: whether a rule may be for every other name.
    """
    rules, faults = [], []
    for number, rule in enumerate(found.spec.rules[:_MOST]):
        models = tuple(
            match.model.value
            for match in rule.matches[:_MOST]
            if 0 < len(match.model.value) <= MAX_NAME_CHARS
        )
        targets = tuple(
            RewriteTarget(target.model_rewrite, max(1, min(_MOST_WEIGHT, target.weight or 1)))
            for target in rule.targets[:_MOST]
            if 0 < len(target.model_rewrite) <= MAX_NAME_CHARS
        )
        takes_others = not rule.matches and not catches_all
        if targets and (models or not rule.matches) and not takes_others:
            rules.append(Rewrite(targets, models))
        wrong = {
            "matches is empty, and the picker has several pools; name the models, since the rule would take "
            "those of other pools": takes_others,
            f"matches: only {len(models)} of {len(rule.matches)} entries name a model (at most {_MOST} "
            "count)": len(models) < len(rule.matches),
            f"targets: {len(targets)} of {len(rule.targets)} have a modelRewrite of 1 to {MAX_NAME_CHARS} "
            f"characters (at most {_MOST} count); a rule without one is left out": not targets
            or len(targets) < len(rule.targets),
        }
        faults += [f"spec.rules[{number}].{fault}" for fault, so in wrong.items() if so]
    if len(found.spec.rules) > _MOST:
        faults.insert(0, f"spec.rules has more than {_MOST} rules; the others are left out")
    return rules, faults[:_NAMED] if found.spec.rules else ["spec.rules is empty"]


def judge_objectives(newer_first: Sequence[Objectives], *, existing: Collection[str]) -> Iterator[Wanted]:
    """Yield the status of each objective of the picker's pools. existing: the pools that exist."""
    owners: dict[str, str] = {}
    for claim in _in_order(newer_first):
        owner = owners.setdefault(claim.name, claim.content.group)
        if owner != claim.content.group:
            yield _wanted(claim, "Conflicted", f"{owner} has an objective of this name, which counts")
        else:
            good = f"requests that name it have priority {claim.content.value}"
            yield _wanted(claim, *_in_pool(claim, existing, good))


def judge_rewrites(
    newer_first: Sequence[ModelRewrites], *, existing: Collection[str], served: frozenset[str] | None
) -> Iterator[Wanted]:
    """Yield the status of each rewrite of the picker's pools.

    existing: the pools that exist. served: every model that a server lists. None: the lists are not known.
    """
    owners: dict[str, Claim[Usable[Sequence[Rewrite]]]] = {}
    for claim, rules in _in_use(newer_first):
        faults, left_out = claim.content.faults, len(claim.content.value) - len(rules)
        names = dict.fromkeys(model for rule in rules for model in rule.models or ("",))
        taken = {name: owner for name in names if (owner := owners.setdefault(name, claim)) is not claim}
        gone = {t.model for rule in rules for t in rule.targets} - served if served is not None else set()
        if faults:
            reason, message = "Invalid", "; ".join(faults)
        elif left_out:
            reason = "Invalid"
            message = f"more than {_MOST_IN_ALL} names in all rewrites; rules of this one that are left out: {left_out}"
        elif taken:
            name, owner = next(iter(taken.items()))
            what = f"model {name[:100]}" if name else "a rule for all other models"
            reason = "Conflicted"
            older = f"the older rewrite {owner.name} of {owner.content.group}"
            message = f"{what} is in {older}; the names that no older rewrite has count"
        else:
            reason, message = _in_pool(claim, existing, "its rules are in use")
            if gone and reason == ACCEPTED:
                named = ", ".join(model[:100] for model in sorted(gone)[:_NAMED])
                reason = "ModelNotServed"
                message = f"no server lists {named}, so requests that go there get 404"
        yield _wanted(claim, reason, message)


def _in_pool(claim: Claim[Usable[Any]], existing: Collection[str], good: str) -> tuple[str, str]:
    """Return reason and message of an object that is good if its pool exists."""
    if claim.content.pool in existing:
        return ACCEPTED, good
    return "TargetNotFound", "no InferencePool has the name in spec.poolRef.name"


def _wanted(claim: Claim[Any], reason: str, message: str) -> Wanted:
    accepted = condition(ACCEPTED, reason, message, generation=claim.metadata.generation)
    return Wanted(claim, ClaimStatus((accepted,)))
