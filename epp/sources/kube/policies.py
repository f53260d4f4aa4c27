"""Decides which policy is used: judges the PrefixRoutingPolicy objects of the picker's pools, and returns the
result for each.

Pure and level-based: the result depends only on the current objects, not on the order in which they came.
- An object is valid if the reader of policy files accepts its spec.
- Of the valid objects in mode Enforce, the oldest routes. Of those in DryRun, the oldest is scored beside it.
  The status of the others names the one that is used.
- One policy routes for all pools of a picker, so the policy of a picker of several pools targets the
  picker's Service (docs/decisions/0203). A policy for one of them is refused.
- A spec that has routed stays the `last accepted` spec of its policy while a newer spec is refused or only
  tried. So a refused change changes nothing, and gives the place to no other policy. The accepted spec is
  kept in the object's status, so that all replicas agree, also after restarts.
- If no policy routes, the default policy does.

Only a change of the spec (`generation`) counts as a change. Writes of status, including the picker's own,
have no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from epp.base.errors import ConfigError
from epp.config.policy import API_VERSION, KIND, Metadata, Policy, PolicySpec, check_spec, only_set
from epp.sources.kube.objects import PolicyObject

_NAME_CHARS: Final = 253
_WRITTEN_OUT_FIELDS: Final = 20
"""An object that sets so many fields to their defaults was written out by an early version of the CRD."""
_NO_POOL: Final = "no InferencePool has the name in spec.targetRef.name"

Target = tuple[str, str]
"""Kind and name of what a policy targets. The name is empty if the policy names nothing."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A spec that routes or has routed, and its generation."""

    generation: int
    spec: PolicySpec


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The content of one condition: true, false or unknown (None), a reason in one word, a message."""

    so: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one policy object."""

    generation: int
    accepted: PolicyResult
    programmed: PolicyResult
    last_accepted: Accepted | None
    rule: str | None = None
    mode: str | None = None
    """The mode of a valid spec."""


@dataclass(frozen=True, slots=True)
class ResolvedPolicies:
    """The policy that routes, the policy in dry run, and the results of all policies of the pool by name."""

    acting: Policy
    tried: Policy | None
    verdicts: Mapping[str, Verdict]


@dataclass(slots=True)
class _Claim:
    """A policy object for our pool or our Service."""

    found: PolicyObject
    """The object as last seen. No decision depends on its status."""
    pool: str
    spec: PolicySpec | None
    fault: str
    last: Accepted | None

    @property
    def name(self) -> str:
        return self.found.metadata.name

    @property
    def order(self) -> tuple[str, str]:
        """Return the sort key: the oldest goes first. Policies of the same second are ordered by name, so
        that all replicas agree.
        """
        return self.found.metadata.creation_timestamp, self.name


class PolicySet:
    """The policies of `pools`, and of the picker's Service, by name. `changed` is true until `resolve` has
    been called.
    """

    def __init__(self, *, pools: Collection[str], service: str = "") -> None:
        self._targets = {("InferencePool", pool) for pool in pools} | {("Service", service)}
        self._refused = "" if len(pools) == 1 else _only_the_picker(pools, service)
        """Why a policy for one pool is refused. Empty: it is not."""
        self._claims: dict[str, _Claim] = {}
        self._of_other_pools: dict[str, PolicyObject] = {}
        self.changed = False

    def __len__(self) -> int:
        return len(self._claims)

    def replace(self, objects: Iterable[PolicyObject]) -> None:
        present = set()
        for found in objects:
            present.add(found.metadata.name)
            self.put(found)
        for name in [name for name in (*self._claims, *self._of_other_pools) if name not in present]:
            self._drop(name)

    def put(self, found: PolicyObject) -> None:
        name = found.metadata.name
        before = self._claims.get(name)
        self._of_other_pools.pop(name, None)
        if target(found) not in self._targets:
            self._drop(name)
            self._of_other_pools[name] = msgspec.structs.replace(found, spec=_only_target(found))
        elif before is not None and _same(before, found):
            before.found = found
        else:
            same_object = before is not None and before.found.metadata.uid == found.metadata.uid
            last = before.last if before and same_object else None
            self._claims[name] = _claim(found, last=last, refused=self._refused)
            self.changed = True

    def remove(self, found: PolicyObject) -> None:
        self._drop(found.metadata.name)

    def found(self, name: str) -> PolicyObject | None:
        """Return a policy of our pools as last seen. None: it is gone."""
        claim = self._claims.get(name)
        return claim.found if claim is not None else None

    def of_other_pools(self) -> Collection[PolicyObject]:
        """Return the policies of this namespace for other pickers, which judge them, if there are such
        pickers. Of the spec only the target is kept.
        """
        return self._of_other_pools.values()

    def resolve(self, *, default: Policy, existing: Collection[str]) -> ResolvedPolicies:
        """Judge all policies. The spec that routes from now on is remembered as accepted.
        existing: the pools that exist.
        """
        self.changed = False
        claims = sorted(self._claims.values(), key=lambda claim: claim.order)
        claims.sort(key=lambda claim: bool(self._refused and claim.pool))
        winner = next((c for c in claims if _claims_routing(c)), None)
        if winner is None:  # no policy asks to route, so a DryRun policy that has routed goes on
            winner = next((c for c in claims if c.last is not None), None)
        elif winner.spec is not None:
            winner.last = Accepted(winner.found.metadata.generation, winner.spec)
        acting = default if winner is None or winner.last is None else _policy(winner, winner.last)
        tried = next((c for c in claims if c.spec is not None and c.spec.mode == "DryRun"), None)
        verdicts = {
            c.name: _verdict(
                c, winner=winner, acting=acting, tried=tried, exists=not c.pool or c.pool in existing
            )
            for c in claims
        }
        policy_tried = None
        if tried is not None and tried.spec is not None:
            policy_tried = _policy(tried, Accepted(tried.found.metadata.generation, tried.spec))
        return ResolvedPolicies(acting=acting, tried=policy_tried, verdicts=verdicts)

    def check_integrity(self) -> None:
        assert not self._claims.keys() & self._of_other_pools.keys()
        for name, claim in self._claims.items():
            assert claim.name == name
            assert (claim.spec is None) == bool(claim.fault), "a claim is valid, or has a fault"
            assert claim.last is None or claim.last.generation <= claim.found.metadata.generation

    def _drop(self, name: str) -> None:
        self._of_other_pools.pop(name, None)
        if self._claims.pop(name, None) is not None:
            self.changed = True


def target(found: PolicyObject) -> Target:
    named = found.spec.get("targetRef") if isinstance(found.spec, dict) else None
    if not isinstance(named, dict):
        named = {}
    return "Service" if named.get("kind") == "Service" else "InferencePool", str(named.get("name") or "")


def _only_target(found: PolicyObject) -> Mapping[str, Any]:
    kind, name = target(found)
    return {"targetRef": {"kind": kind, "name": name[:_NAME_CHARS]}}


def _only_the_picker(pools: Collection[str], service: str) -> str:
    return (
        f"spec.targetRef: one policy routes for all pools of this picker ({', '.join(pools)}), so it targets the "
        f"picker; write {{kind: Service, name: {service or '(kubernetes.service of its configuration)'}}}, or "
        "give this pool a picker of its own"
    )


def _same(before: _Claim, found: PolicyObject) -> bool:
    """Return whether the spec is unchanged. A change of target is a change of spec, and so of generation."""
    now, seen = found.metadata, before.found.metadata
    return (seen.uid, seen.generation) == (now.uid, now.generation)


def _claim(found: PolicyObject, *, last: Accepted | None, refused: str) -> _Claim:
    """refused: why no policy may target a pool. Empty: it may."""
    kind, name = target(found)
    pool, spec, fault = "" if kind == "Service" else name, None, ""
    try:
        spec = check_spec(found.spec)
    except ConfigError as error:
        fault = str(error)
    if pool and refused:
        spec, fault = None, refused
    return _Claim(found, pool, spec, fault, last or _remembered(found))


def _remembered(found: PolicyObject) -> Accepted | None:
    """Return the spec that was accepted last, by the object's status. Another release or another author may
    have written it, so it is checked again.
    """
    kept = found.status.last_accepted
    if kept is None or kept.generation > found.metadata.generation:
        return None
    try:
        return Accepted(kept.generation, check_spec(kept.spec))
    except ConfigError:
        return None


def _claims_routing(claim: _Claim) -> bool:
    """Return whether the policy asks to route, by its spec or, if that is refused, its last accepted one."""
    if claim.spec is not None:
        return claim.spec.mode == "Enforce"
    return claim.last is not None


def _policy(claim: _Claim, accepted: Accepted) -> Policy:
    metadata = Metadata(
        name=claim.name, namespace=claim.found.metadata.namespace, generation=accepted.generation
    )
    return Policy(api_version=API_VERSION, kind=KIND, metadata=metadata, spec=accepted.spec)


def _verdict(
    claim: _Claim, *, winner: _Claim | None, acting: Policy, tried: _Claim | None, exists: bool
) -> Verdict:
    accepted = _accepted(claim, winner=winner, tried=tried, exists=exists)
    return Verdict(
        generation=claim.found.metadata.generation,
        accepted=accepted,
        programmed=_programmed(claim, accepted, acting=acting, routes=claim is winner, tried=claim is tried),
        last_accepted=claim.last,
        rule=claim.spec.rule if claim.spec else None,
        mode=claim.spec.mode if claim.spec else None,
    )


def _accepted(claim: _Claim, *, winner: _Claim | None, tried: _Claim | None, exists: bool) -> PolicyResult:
    if claim.spec is None:
        return PolicyResult(False, "Invalid", claim.fault)
    dry_run = claim.spec.mode == "DryRun"
    first = tried if dry_run else winner
    if first is not None and first is not claim:
        what = "in dry run" if dry_run else "in force"
        text = f"the older policy {first.name} is {what} for this picker; delete one of the two"
        return PolicyResult(False, "Conflicted", text)
    if not exists:
        return PolicyResult(False, "TargetNotFound", _NO_POOL)
    return PolicyResult(True, "Accepted", f"the policy is valid{_written_out(claim.found, claim.spec)}")


def _written_out(found: PolicyObject, spec: PolicySpec) -> str:
    """Return a note about an object that may carry the defaults of an early version."""
    repeated = _fields(found.spec) - _fields(only_set(spec))
    if repeated < _WRITTEN_OUT_FIELDS:
        return ""
    where = f"-n {found.metadata.namespace}"
    return (
        f"; {repeated} fields repeat defaults, so it may carry those of an early version: kubectl apply "
        f"view-last-applied prefixroutingpolicy {found.metadata.name} {where} | kubectl replace {where} -f - "
        "removes them"
    )


def _fields(spec: Any) -> int:
    """Return how many fields a spec sets, at any depth."""
    return sum(map(_fields, spec.values())) if isinstance(spec, dict) else 1


def _programmed(
    claim: _Claim, accepted: PolicyResult, *, acting: Policy, routes: bool, tried: bool
) -> PolicyResult:
    who = (
        f"policy {acting.metadata.name}"
        if not routes
        else f"generation {acting.metadata.generation} of this policy"
    )
    if accepted.so and routes and claim.spec is not None and claim.spec.mode == "Enforce":
        return PolicyResult(True, "Programmed", "this policy routes requests")
    if tried and claim.spec is not None:
        note = (
            ""
            if claim.spec.chunks == acting.spec.chunks
            else "; its chunks are not tried: matches come from the table in use"
        )
        return PolicyResult(False, "DryRun", f"each pick is scored by this policy too; {who} routes{note}")
    return PolicyResult(False, accepted.reason, f"{who} routes")
