"""Reads the objects that name a pool of the picker, by kind and API group: InferenceObjectives, which give a
priority to each name that a header may have, and InferenceModelRewrites, which give other names to models.
Pure: a reflector passes the objects in, and `statuses` sends the statuses.

The oldest object goes first, and the newer group before the older: the first of two objectives of one name,
and the first of two rules for one model, counts. Weights should be set for all targets of a rule or for none;
a missing weight counts as 1. A target without a name is left out. If a picker has several pools, a rule for
every other name is left out, because it would take the names of the other pools' models.

The status has one condition, `Accepted`, as in the CRDs. True: the object is in use. False: the reason says
what is wrong; the valid rules of a rewrite are used anyway. Objects of other pools keep the condition that
their CRD or another picker has given them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from epp.config.kubernetes import LlmdGroup
from epp.request.client_names import MAX_NAME_CHARS
from epp.request.rewriting import Rewrite, Rewrites, RewriteTarget
from epp.sources.kube.objects import Condition, ModelRewrite, Objective, ObjectMeta, RewriteRule
from epp.sources.kube.policies import PolicyResult
from epp.sources.kube.statuses import StatusWrite, condition, status_patch

_MOST_OBJECTS: Final = 1024
"""Most objects of the picker's pools. Others are left out."""
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
_MOST_PRIORITY: Final = 1000

GROUPS: Final[Sequence[LlmdGroup]] = get_args(LlmdGroup)
"""The API groups of both kinds. The newer group is first."""
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
            # A merge patch replaces the whole list, so it has the conditions of others too.
            both = [*(c for c in before if c.type != ACCEPTED), wanted]
            patch = status_patch({"conditions": msgspec.to_builtins(both)}, metadata=metadata)
            yield StatusWrite(path, (generation, result), patch)


def _in_groups(
    plural: str, groups: Collection[LlmdGroup], *, pools: Collection[str], read: Callable[[Any, list[str]], C]
) -> list[Claims[C]]:
    """Return a set of claims for each group, the newer group first."""
    return [
        Claims(
            pools=pools,
            group=group,
            path=f"/apis/{group}/v1alpha2/namespaces/{{namespace}}/{plural}",
            read=read,
        )
        for group in GROUPS
        if group in groups
    ]


Objectives = Claims[int]
"""The objectives of one group, with their priorities."""


def objectives_in(groups: Collection[LlmdGroup], *, pools: Collection[str]) -> list[Objectives]:
    return _in_groups("inferenceobjectives", groups, pools=pools, read=_priority)


def merged(newer_first: Sequence[Objectives]) -> Mapping[str, int]:
    """Return the priority by the name of the objective."""
    return {claim.name: claim.content for each in reversed(newer_first) for claim in each.claims()}


def judge_objectives(newer_first: Sequence[Objectives], *, existing: Collection[str]) -> Iterator[Judged]:
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
    return max(-_MOST_PRIORITY, min(_MOST_PRIORITY, found.spec.priority or 0))


RewriteClaim = Claim[Sequence[Rewrite]]
ModelRewrites = Claims[Sequence[Rewrite]]
"""The rewrites of one group, with their usable rules."""


def rewrites_in(groups: Collection[LlmdGroup], *, pools: Collection[str]) -> list[ModelRewrites]:
    read = partial(_rules, catches_all=len(pools) == 1)
    return _in_groups("inferencemodelrewrites", groups, pools=pools, read=read)


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


def judge_rewrites(
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
