"""Decides which policy is used: judges the PrefixRoutingPolicy objects of the picker's pools, and says which
status each should have.

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
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from epp.base.errors import ConfigError
from epp.config.policy import API_VERSION, KIND, Metadata, Policy, check_spec, only_set
from epp.sources.kube.objects import (
    PATH,
    Condition,
    LastAccepted,
    ObjectMeta,
    PolicyObject,
    PolicyStatus,
)
from epp.sources.kube.statuses import ACCEPTED, Claim, Claims, Wanted, claims_at, condition, oldest_first

_PATIENCE_S: Final = 2.0
"""A policy for another picker gets a status from this one after this time, within 5 s with the looks. A
picker that serves the target is faster. One that comes later replaces what is written here."""


class Target(NamedTuple):
    """What a policy targets. The name is empty if the policy names nothing."""

    kind: str
    name: str


@dataclass(slots=True)
class Stated:
    """What counts of a policy object."""

    target: Target
    ours: bool
    """Whether this picker judges it."""
    policy: Policy | None = None
    """The policy, if it is valid."""
    fault: str = ""
    last: Policy | None = None
    """The spec that routes or was the last to route."""

    @property
    def mode(self) -> str:
        """Return the mode in which the object counts. A refused change goes on as the spec before it."""
        if self.policy is not None:
            return self.policy.spec.mode
        return "Enforce" if self.last is not None else ""


@dataclass(frozen=True, slots=True)
class ResolvedPolicies:
    """The policy that routes, the policy in dry run, and the statuses of all policies of the picker by name,
    without times.
    """

    acting: Policy
    tried: Policy | None
    statuses: Mapping[str, PolicyStatus]


class PolicySet:
    """The policies of the namespace. Those for `pools` and for the picker's Service are judged."""

    def __init__(self, *, pools: Collection[str], service: str = "", namespace: str = "") -> None:
        path = PATH.format(namespace=namespace)
        self.claims: Claims[Stated] = claims_at("policies", PolicyObject, path, content=self._stated)
        self._targets = {("InferencePool", pool) for pool in pools} | {("Service", service)}
        self._refused = "" if len(pools) == 1 else _only_the_picker(pools, service)
        """Why a policy for one pool is refused. Empty: it is not."""

    def resolve(self, *, default: Policy, existing: Collection[str]) -> ResolvedPolicies:
        """Judge all policies. The spec that routes from now on is remembered as accepted.
        existing: the pools that exist.
        """
        claims = [each for each in oldest_first(self.claims) if each.content.ours]
        # A policy that is refused for its target goes last, although its last accepted spec may route on.
        claims.sort(key=lambda each: bool(self._refused) and each.content.target.kind == "InferencePool")
        winner = next((each for each in claims if each.content.mode == "Enforce"), None)
        if winner is None:  # no policy asks to route, so a DryRun policy that has routed goes on
            winner = next((each for each in claims if each.content.last is not None), None)
        elif winner.content.policy is not None:
            winner.content.last = winner.content.policy
        acting = default if winner is None or winner.content.last is None else winner.content.last
        tried = next((each for each in claims if each.content.mode == "DryRun"), None)
        used = {"Enforce": winner, "DryRun": tried}
        statuses = {each.name: _status(each, used=used, acting=acting, existing=existing) for each in claims}
        return ResolvedPolicies(acting, tried.content.policy if tried is not None else None, statuses)

    def wanted(self, outcome: ResolvedPolicies) -> Iterator[Wanted]:
        """Yield the status of each policy. One for another picker gets a status only if no picker has judged
        its spec.
        """
        for claim in self.claims.found.values():
            if (status := outcome.statuses.get(claim.name)) is not None:
                if status.last_accepted is None:
                    # What this version cannot read, a newer one wrote: it stays for the way forward.
                    status = replace(status, last_accepted=claim.status.last_accepted)
                yield Wanted(claim, status)
            elif not claim.content.ours and claim.status.observed_generation < claim.metadata.generation:
                yield Wanted(claim, _nobodys(claim), after_s=_PATIENCE_S)

    def _stated(self, found: PolicyObject, before: Stated | None) -> Stated:
        stated = Stated(target := _target(found.spec), ours=target in self._targets)
        if not stated.ours:
            return stated
        metadata, kept = found.metadata, found.status.last_accepted
        stated.fault = self._refused if target.kind == "InferencePool" else ""
        try:
            if not stated.fault:
                stated.policy = _policy(metadata, metadata.generation, found.spec)
        except ConfigError as error:
            stated.fault = str(error)
        if before is not None and before.last is not None:
            stated.last = before.last
        elif (
            kept is not None
            and kept.generation <= metadata.generation
            and _target(kept.spec) in self._targets  # else a picker of another pool accepted it
        ):
            with suppress(ConfigError):  # another release may have written the status, so it is checked again
                stated.last = _policy(metadata, kept.generation, kept.spec)
        return stated


def _target(spec: Any) -> Target:
    named = spec.get("targetRef") if isinstance(spec, dict) else None
    if not isinstance(named, dict):
        named = {}
    kind = "Service" if named.get("kind") == "Service" else "InferencePool"
    return Target(kind, str(named.get("name") or "")[:253])


def _only_the_picker(pools: Collection[str], service: str) -> str:
    return (
        f"spec.targetRef: one policy routes for all pools of this picker ({', '.join(pools)}), so it targets the "
        f"picker; write {{kind: Service, name: {service or '(kubernetes.service of its configuration)'}}}, or "
        "give this pool a picker of its own"
    )


def _policy(metadata: ObjectMeta, generation: int, spec: object) -> Policy:
    named = Metadata(name=metadata.name, namespace=metadata.namespace, generation=generation)
    return Policy(api_version=API_VERSION, kind=KIND, metadata=named, spec=check_spec(spec))


Used = Mapping[str, Claim[Stated] | None]
"""The policy that routes and the one in dry run, by mode."""


def _status(claim: Claim[Stated], *, used: Used, acting: Policy, existing: Collection[str]) -> PolicyStatus:
    stated, generation = claim.content, claim.metadata.generation
    accepted = _accepted(claim, used=used, existing=existing)
    last, spec = stated.last, stated.policy.spec if stated.policy is not None else None
    return PolicyStatus(
        observed_generation=generation,
        conditions=(accepted, _programmed(claim, accepted, used=used, acting=acting)),
        rule=spec.rule if spec is not None else None,
        mode=spec.mode if spec is not None else None,
        last_accepted=LastAccepted(last.metadata.generation, only_set(last.spec)) if last else None,
    )


def _accepted(claim: Claim[Stated], *, used: Used, existing: Collection[str]) -> Condition:
    stated = claim.content
    first = used.get(stated.mode)
    if stated.policy is None:
        reason, message = "Invalid", stated.fault
    elif first is not None and first is not claim:
        what = "in dry run" if stated.mode == "DryRun" else "in force"
        reason = "Conflicted"
        message = f"the older policy {first.name} is {what} for this picker; delete one of the two"
    elif stated.target.kind == "InferencePool" and stated.target.name not in existing:
        reason, message = "TargetNotFound", "no InferencePool has the name in spec.targetRef.name"
    else:
        reason, message = ACCEPTED, "the policy is valid"
    return condition(ACCEPTED, reason, message, generation=claim.metadata.generation)


def _programmed(claim: Claim[Stated], accepted: Condition, *, used: Used, acting: Policy) -> Condition:
    policy, routes = claim.content.policy, claim is used["Enforce"]
    who = f"policy {acting.metadata.name}"
    if routes:
        who = f"generation {acting.metadata.generation} of this policy"
    if accepted.reason == ACCEPTED and routes and claim.content.mode == "Enforce":
        reason, message = "Programmed", "this policy routes requests"
    elif policy is not None and claim is used["DryRun"]:
        reason, message = "DryRun", f"each pick is scored by this policy too; {who} routes"
        if policy.spec.chunks != acting.spec.chunks:
            message += "; its chunks are not tried: matches come from the table in use"
    else:
        reason, message = accepted.reason, f"{who} routes"
    return condition("Programmed", reason, message, generation=claim.metadata.generation)


def _nobodys(claim: Claim[Stated]) -> PolicyStatus:
    """Return the status of a policy that no picker has judged. It replaces an older status for another
    target.
    """
    message = (
        f"no picker for {' '.join(claim.content.target).strip()} has judged this policy; check spec.targetRef, and "
        "whether a gateway with that target runs in this namespace"
    )
    generation, kinds = claim.metadata.generation, (ACCEPTED, "Programmed")
    conditions = [condition(kind, "TargetNotFound", message, generation=generation) for kind in kinds]
    return PolicyStatus(observed_generation=generation, conditions=tuple(conditions))
