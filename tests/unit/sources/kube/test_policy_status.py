"""The content of a policy's status, and when it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from epp.config.policy import DEFAULT_POLICY
from epp.sources.kube.live import Live, LiveEndpoint
from epp.sources.kube.objects import LastAccepted, PolicyStatus
from epp.sources.kube.policies import PolicySet, Verdict
from epp.sources.kube.policy_status import WriteTimes, desired, patch
from tests.unit.sources.kube.objects import policy

NOTHING = PolicyStatus()
LIVE = Live(
    [LiveEndpoint("a:1", "vllm"), LiveEndpoint("b:1", "vllm", "scrapes fail")], tried_picks=8, tried_agreed=6
)


def verdict_on(**spec: Any) -> Verdict:
    policies = PolicySet(pools=["vllm"])
    policies.put(policy("p", generation=4, **spec))
    return policies.resolve(default=DEFAULT_POLICY, existing=["vllm"]).verdicts["p"]


def status(
    verdict: Verdict, *, before: PolicyStatus = NOTHING, hit_ratio: str | None = "0.250", at: str = "T1"
) -> PolicyStatus:
    return desired(verdict, before=before, live=LIVE, hit_ratio=hit_ratio, time_text=at)


def as_read(written: PolicyStatus) -> PolicyStatus:
    """Return the object as it comes back in the API server's JSON."""
    return msgspec.json.decode(msgspec.json.encode(written), type=PolicyStatus)


def test_status_has_conditions_endpoints_hit_ratio_and_the_accepted_fields() -> None:
    body: Mapping[str, Any] = patch(status(verdict_on(rule="affinity")), uid="u")
    assert body["metadata"] == {"uid": "u"}
    told = body["status"]
    assert told["observedGeneration"] == 4
    assert [(c["type"], c["status"], c["reason"], c["observedGeneration"]) for c in told["conditions"]] == [
        ("Accepted", "True", "Accepted", 4),
        ("Programmed", "True", "Programmed", 4),
    ]
    assert (told["endpoints"], told["readyEndpoints"], told["hitRatio"]) == (2, 1, "0.250")
    assert told["lastAccepted"]["generation"] == 4
    assert told["lastAccepted"]["spec"] == {"targetRef": {"name": "vllm"}, "rule": "affinity"}, (
        "the spec has only the fields that were set"
    )
    assert (told["rule"], told["mode"]) == ("affinity", "Enforce")
    assert told["dryRun"] is None


def test_what_a_newer_picker_accepted_stays_in_the_status() -> None:
    newer = LastAccepted(3, {"targetRef": {"name": "vllm"}, "ofTheNextRelease": True})
    found = status(verdict_on(ofTheNextRelease=False), before=PolicyStatus(last_accepted=newer))
    assert found.conditions[0].reason == "Invalid"
    assert found.last_accepted == newer


def test_the_status_of_a_dry_run_says_how_often_it_agrees() -> None:
    body = patch(status(verdict_on(mode="DryRun"), hit_ratio=None), uid="u")
    assert body["status"]["dryRun"] == {"picks": 8, "agreement": "0.750"}
    assert body["status"]["hitRatio"] is None, "a merge patch removes the field"
    assert body["status"]["lastAccepted"] is None


def test_the_status_has_the_saturation_of_the_policy_in_force() -> None:
    live = Live(LIVE.endpoints, 8, 6, saturation=1.256)

    def told(**spec: Any) -> Mapping[str, Any]:
        wanted = desired(verdict_on(**spec), before=NOTHING, live=live, hit_ratio=None, time_text="T")
        body: Mapping[str, Any] = patch(wanted, uid="u")["status"]
        return body

    assert told()["saturation"] == "1.26"
    assert told(mode="DryRun")["saturation"] is None, "the other policy is in force"
    assert patch(status(verdict_on()), uid="u")["status"]["saturation"] is None


def test_a_policy_that_has_no_part_in_routing_shows_no_numbers() -> None:
    told = patch(status(verdict_on(sessionHeader="host")), uid="u")["status"]
    assert [told[name] for name in ("endpoints", "readyEndpoints", "hitRatio")] == [None, None, None]


def test_the_time_of_a_condition_is_that_of_its_last_change() -> None:
    first = status(verdict_on(), at="T1")
    assert {
        c.last_transition_time for c in status(verdict_on(rule="random"), before=first, at="T2").conditions
    } == {"T1"}
    refused = status(verdict_on(sessionHeader="host"), before=first, at="T2")
    assert {c.last_transition_time for c in refused.conditions} == {"T2"}


def test_a_status_that_the_object_has_already_is_not_written_again() -> None:
    wanted = status(verdict_on())
    assert not WriteTimes(interval_s=10).due("u", wanted=wanted, says=as_read(wanted), now=0.0)


def test_a_change_of_state_is_written_within_a_second_of_the_last_write() -> None:
    times = WriteTimes(interval_s=10)
    says, wanted = status(verdict_on()), status(verdict_on(sessionHeader="host"))
    assert times.due("u", wanted=wanted, says=says, now=5.0)
    times.wrote("u", now=5.0)
    assert not times.due("u", wanted=wanted, says=says, now=5.9)
    assert times.due("u", wanted=wanted, says=says, now=6.0)


def test_changing_numbers_are_written_once_in_an_interval() -> None:
    times = WriteTimes(interval_s=10)
    says, wanted = status(verdict_on()), status(verdict_on(), hit_ratio="0.260")
    times.wrote("u", now=5.0)
    assert not times.due("u", wanted=wanted, says=says, now=14.9)
    assert times.due("u", wanted=wanted, says=says, now=15.0)


def test_deleted_objects_are_forgotten() -> None:
    times = WriteTimes(interval_s=10)
    times.wrote("u", now=5.0)
    times.keep(set())
    assert times.due("u", wanted=status(verdict_on()), says=NOTHING, now=5.0)
