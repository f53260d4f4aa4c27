"""Keeps the InferenceModelRewrites of one API group, which give other names to models. A reflector passes the
objects in; `cluster` reads them.

The oldest object goes first. Objects of the same second go by name, so that all replicas agree. If two rules
have the same name, the first rule counts. Weights should be set for all targets of a rule or for none; a
missing weight counts as 1. A target without a name is left out. Everything that is left out is a fault of the
object, and `rewrite_status` writes the faults into its status. If a picker has several pools, a rule for
every other name is left out, because it would take the names of the other pools' models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, get_args

from epp.config.kubernetes import LlmdGroup
from epp.request.client_names import MAX_NAME_CHARS
from epp.request.rewriting import Rewrite, Rewrites, RewriteTarget
from epp.sources.kube.objects import Condition, ModelRewrite, RewriteRule

PATHS: Final[Mapping[str, str]] = {
    group: f"/apis/{group}/v1alpha2/namespaces/{{namespace}}/inferencemodelrewrites"
    for group in get_args(LlmdGroup)
}
"""Where each API group has its rewrites. The newer group is first."""
_MOST_OBJECTS: Final = 1024
"""Most objects of one group. Others are left out."""
_MOST_RULES: Final = 1024
"""Most rules of one object."""
_MOST_NAMES: Final = 1024
"""Most names of one rule: models that it matches, and targets."""
_MOST_IN_ALL: Final = 16_384
"""Most names in all rules of one group, since each change of an object makes a new index of all of them. The
newest objects are left out."""
_MOST_WEIGHT: Final = 1_000_000
_NO_MATCHES: Final = ".matches is empty, and the picker has several pools; name the models, since the rule would take those of other pools"
_MOST_FAULTS: Final = 5
"""Most faults that are reported for one object."""


@dataclass(frozen=True, slots=True)
class RewriteClaim:
    """One InferenceModelRewrite."""

    group: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created: str
    pool: str
    rules: Sequence[Rewrite]
    """The usable rules."""
    faults: Sequence[str]
    """The faults, in words."""
    conditions: tuple[Condition, ...]
    """Its status, as last seen."""


class ModelRewrites:
    """The rewrites of the picker's pools, by name. `version` grows with each change of a spec."""

    def __init__(self, *, pools: Collection[str], group: str) -> None:
        self.group = group
        self.version = 0
        self._pools = pools
        self._claims: dict[str, RewriteClaim] = {}
        self._of_other_pools: dict[str, RewriteClaim] = {}

    def replace(self, objects: Iterable[ModelRewrite]) -> None:
        before = {claim.name for claim in (*self._claims.values(), *self._of_other_pools.values())}
        for found in objects:
            before.discard(found.metadata.name)
            self.put(found)
        for name in before:
            self._drop(name)

    def put(self, found: ModelRewrite) -> None:
        """Take a new or changed object. A change of its status alone does not count."""
        name = found.metadata.name
        known = self._claims.get(name) or self._of_other_pools.get(name)
        if known is not None and _same(known, found):
            self._see(known, found)
            return
        self._drop(name)
        if found.spec.pool_ref.name not in self._pools:
            if len(self._of_other_pools) < _MOST_OBJECTS:
                self._of_other_pools[name] = _claim(self.group, found, judge=False)
        elif len(self._claims) < _MOST_OBJECTS:
            self._claims[name] = _claim(self.group, found, catches_all=len(self._pools) == 1)
            self.version += 1

    def remove(self, found: ModelRewrite) -> None:
        self._drop(found.metadata.name)

    def claims(self) -> list[RewriteClaim]:
        """Return the objects of the picker's pools, in order of precedence."""
        return sorted(self._claims.values(), key=lambda claim: (claim.created, claim.name))

    def of_other_pools(self) -> Collection[RewriteClaim]:
        """Return the objects of the namespace for other pools. Their rules are not read."""
        return self._of_other_pools.values()

    def rules(self) -> list[Rewrite]:
        rules = [rule for claim in self.claims() for rule in claim.rules]
        names = list(accumulate(len(rule.models) + len(rule.targets) for rule in rules))
        return rules[: bisect_right(names, _MOST_IN_ALL)]

    def check_integrity(self) -> None:
        assert not self._claims.keys() & self._of_other_pools.keys()
        assert len(self._claims) <= _MOST_OBJECTS
        assert len(self._of_other_pools) <= _MOST_OBJECTS

    def _see(self, known: RewriteClaim, found: ModelRewrite) -> None:
        seen = replace(
            known, resource_version=found.metadata.resource_version, conditions=found.status.conditions
        )
        where = self._claims if known.name in self._claims else self._of_other_pools
        where[known.name] = seen

    def _drop(self, name: str) -> None:
        self._of_other_pools.pop(name, None)
        if self._claims.pop(name, None) is not None:
            self.version += 1


def all_rewrites(newer_first: Sequence[ModelRewrites]) -> Rewrites:
    return Rewrites(rule for rewrites in newer_first for rule in rewrites.rules())


def _same(known: RewriteClaim, found: ModelRewrite) -> bool:
    """Return whether the spec is unchanged. The generation grows with each change of the spec."""
    return (known.uid, known.generation) == (found.metadata.uid, found.metadata.generation)


def _claim(group: str, found: ModelRewrite, *, judge: bool = True, catches_all: bool = True) -> RewriteClaim:
    metadata, faults = found.metadata, list[str]()
    return RewriteClaim(
        group=group,
        name=metadata.name,
        uid=metadata.uid,
        generation=metadata.generation,
        resource_version=metadata.resource_version,
        created=metadata.creation_timestamp,
        pool=found.spec.pool_ref.name,
        rules=_rules(found, faults, catches_all=catches_all) if judge else (),
        faults=faults,
        conditions=found.status.conditions,
    )


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
