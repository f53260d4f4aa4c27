"""What the statuses of policies and rewrites say, and when a picker writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from epp.config.policy import DEFAULT_POLICY
from epp.sources.kube import claims, statuses
from epp.sources.kube.api import Api, ApiError, Query
from epp.sources.kube.claims import ModelRewrites, judge_rewrites
from epp.sources.kube.objects import Condition, LastAccepted, PolicyStatus
from epp.sources.kube.policies import PolicySet, Verdict
from epp.sources.kube.statuses import StatusWrite, StatusWriter, Unclaimed, desired, patch
from tests.unit.sources.kube.objects import policy, rewrite, rewrites_of, rule

NOTHING = PolicyStatus()


class StatusServer(Api):
    """Records the writes, and answers all with one status."""

    def __init__(self, *, answers: int = 200) -> None:
        super().__init__(None)
        self.wrote: list[tuple[str, Any]] = []
        self._answers = answers

    async def request(self, method: str, path: str, *, query: Query = (), body: Any = None) -> bytes:
        self.wrote.append((f"{method} {path.rpartition('/ns/')[2]}", body))
        if self._answers != 200:
            raise ApiError("no", status=self._answers)
        return b"{}"


class Replica:
    """The part of a picker that decides what to write."""

    def __init__(self, *found: Any, rewrites: ModelRewrites | None = None) -> None:
        self.policies = PolicySet(pools=["vllm"])
        self._rewrites = [rewrites] if rewrites is not None else []
        self._unclaimed = Unclaimed()
        for each in found:
            self.policies.put(each)

    def due(self, now: float) -> list[StatusWrite]:
        outcome = self.policies.resolve(default=DEFAULT_POLICY, existing=["vllm"])
        words: Any = {"namespace": "ns", "time_text": "T"}
        judged = judge_rewrites(self._rewrites, existing=["vllm"], served=None)
        return [
            *statuses.due(outcome, self.policies, unclaimed=self._unclaimed, now=now, **words),
            *claims.due(judged, **words),
        ]


async def look(server: StatusServer, replica: Replica, *times: float) -> list[str]:
    """Let the replica look at these times. Return the places that it wrote to."""
    writer = StatusWriter(server)
    for now in times:
        await writer.look(replica.due(now), now=now)
    return [place for place, _ in server.wrote]


def said(kind: str, status: str, reason: str, **more: Any) -> Condition:
    return Condition(type=kind, status=status, reason=reason, **more)


async def test_statuses_that_differ_are_written_with_the_version_that_was_read() -> None:
    server = StatusServer()
    found = rewrites_of(rewrite("r", rule("gpt"), conditions=(said("Seen", "True", "R"),)))
    assert await look(server, Replica(policy("a"), rewrites=found), 1.0) == [
        "PATCH prefixroutingpolicies/a/status",
        "PATCH inferencemodelrewrites/r/status",
    ]
    assert [body["metadata"] for _, body in server.wrote] == [
        {"uid": "uid-of-a", "resourceVersion": "1"},
        {"uid": "uid-r", "resourceVersion": "1"},
    ]
    kept = [(c["type"], c["status"], c["reason"]) for c in server.wrote[1][1]["status"]["conditions"]]
    assert kept == [("Seen", "True", "R"), ("Accepted", "True", "Accepted")], "others' conditions stay"


@pytest.mark.parametrize("answers", [200, 404, 409, 500])
async def test_the_same_result_is_not_sent_again_for_some_seconds(answers: int) -> None:
    """The watch tells of a write that succeeded. Here it is silent."""
    assert len(await look(StatusServer(answers=answers), Replica(policy("a")), 1.0, 2.0, 5.9, 6.1, 7.0)) == 2


async def test_another_result_is_written_at_the_next_look() -> None:
    server, replica, writer = StatusServer(), Replica(policy("a")), None
    writer = StatusWriter(server)
    await writer.look(replica.due(1.0), now=1.0)
    replica.policies.put(policy("a", generation=2, sessionHeader="host"))
    await writer.look(replica.due(2.0), now=2.0)
    assert [body["status"]["conditions"][0]["reason"] for _, body in server.wrote] == ["Accepted", "Invalid"]


async def test_new_and_refused_policies_are_written_first() -> None:
    known = {"conditions": [{"type": "Accepted", "status": "True"}]}
    many = [policy(f"p{n:02}", status=known) for n in range(40)]
    replica = Replica(*many, policy("z-bad", sessionHeader="host", status=known), policy("z-new"))
    wrote = await look(StatusServer(), replica, 1.0)
    assert [place.split("/")[1] for place in wrote[:3]] == ["p00", "z-bad", "z-new"]
    assert len(wrote) == 20
    assert len(await look(StatusServer(), replica, 1.0, 2.0, 3.0)) == 42, "the others follow"


async def test_a_policy_for_a_pool_without_a_picker_is_marked() -> None:
    replica = Replica(
        policy("moved", target="elsewhere", generation=2, status={"observedGeneration": 1}),
        policy("theirs", target="elsewhere", status={"observedGeneration": 1}),
    )
    server = StatusServer()
    assert await look(server, replica, 1.0, 3.0) == [], "a picker that serves the pool is faster"
    assert await look(server, replica, 4.5) == ["PATCH prefixroutingpolicies/moved/status"]
    (condition, _) = server.wrote[0][1]["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "TargetNotFound")
    assert "elsewhere" in condition["message"]


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
