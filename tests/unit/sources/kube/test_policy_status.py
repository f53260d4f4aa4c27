"""The content of a policy's status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epp.config.policy import DEFAULT_POLICY
from epp.sources.kube.objects import LastAccepted, PolicyStatus
from epp.sources.kube.policies import PolicySet, Verdict
from epp.sources.kube.policy_status import desired, patch
from tests.unit.sources.kube.objects import policy

NOTHING = PolicyStatus()


def verdict_on(**spec: Any) -> Verdict:
    policies = PolicySet(pools=["vllm"])
    policies.put(policy("p", generation=4, **spec))
    return policies.resolve(default=DEFAULT_POLICY, existing=["vllm"]).verdicts["p"]


def status(verdict: Verdict, *, before: PolicyStatus = NOTHING, at: str = "T1") -> PolicyStatus:
    return desired(verdict, before=before, time_text=at)


def test_the_status_has_conditions_and_the_accepted_fields() -> None:
    body: Mapping[str, Any] = patch(status(verdict_on(rule="affinity")), found=policy("p"))
    assert body["metadata"] == {"uid": "uid-of-p", "resourceVersion": "1"}
    told = body["status"]
    assert told["observedGeneration"] == 4
    assert [(c["type"], c["status"], c["reason"], c["observedGeneration"]) for c in told["conditions"]] == [
        ("Accepted", "True", "Accepted", 4),
        ("Programmed", "True", "Programmed", 4),
    ]
    assert told["lastAccepted"]["generation"] == 4
    assert told["lastAccepted"]["spec"] == {"targetRef": {"name": "vllm"}, "rule": "affinity"}, (
        "the spec has only the fields that were set"
    )
    assert (told["rule"], told["mode"]) == ("affinity", "Enforce")


def test_what_a_newer_picker_accepted_stays_in_the_status() -> None:
    newer = LastAccepted(3, {"targetRef": {"name": "vllm"}, "ofTheNextRelease": True})
    found = status(verdict_on(ofTheNextRelease=False), before=PolicyStatus(last_accepted=newer))
    assert found.conditions[0].reason == "Invalid"
    assert found.last_accepted == newer


def test_the_time_of_a_condition_is_that_of_its_last_change() -> None:
    first = status(verdict_on(), at="T1")
    assert {
        c.last_transition_time for c in status(verdict_on(rule="random"), before=first, at="T2").conditions
    } == {"T1"}
    refused = status(verdict_on(sessionHeader="host"), before=first, at="T2")
    assert {c.last_transition_time for c in refused.conditions} == {"T2"}
