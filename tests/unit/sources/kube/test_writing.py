"""Which statuses of policies and rewrites a picker writes, and when: its requests to the API server."""

from __future__ import annotations

from typing import Any

import pytest

from epp.config.policy import DEFAULT_POLICY
from epp.sources.kube import claims, policy_status
from epp.sources.kube.api import Api, ApiError, Query
from epp.sources.kube.objects import Condition
from epp.sources.kube.policies import PolicySet
from epp.sources.kube.policy_status import Unclaimed
from epp.sources.kube.rewrites import ModelRewrites, judge
from epp.sources.kube.writing import StatusWrite, StatusWriter
from tests.unit.sources.kube.objects import policy, rewrite, rewrites_of, rule


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
        self._unclaimed = Unclaimed(), Unclaimed()
        for each in found:
            self.policies.put(each)

    def due(self, now: float) -> list[StatusWrite]:
        outcome = self.policies.resolve(default=DEFAULT_POLICY, existing=["vllm"])
        words: Any = {"namespace": "ns", "time_text": lambda: "T", "now": now}
        of_policies, of_rewrites = self._unclaimed
        return [
            *policy_status.due(outcome, self.policies, unclaimed=of_policies, **words),
            *claims.due(
                self._rewrites,
                judge(self._rewrites, existing=["vllm"], served=None),
                unclaimed=of_rewrites,
                **words,
            ),
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


async def test_an_object_for_a_pool_without_a_picker_is_marked() -> None:
    judged = said("Accepted", "True", "Accepted", observed_generation=1)
    replica = Replica(
        policy("moved", target="elsewhere", generation=2, status={"observedGeneration": 1}),
        policy("theirs", target="elsewhere", status={"observedGeneration": 1}),
        rewrites=rewrites_of(
            rewrite("typo", rule("gpt"), pool="vlm", conditions=(said("Accepted", "Unknown", "Pending"),)),
            rewrite("theirs", rule("gpt"), pool="other", conditions=(judged,)),
        ),
    )
    server = StatusServer()
    assert await look(server, replica, 1.0, 3.0) == [], "a picker that serves the pool is faster"
    assert await look(server, replica, 4.5) == [
        "PATCH prefixroutingpolicies/moved/status",
        "PATCH inferencemodelrewrites/typo/status",
    ]
    of_policy, of_rewrite = (body["status"]["conditions"][0] for _, body in server.wrote)
    assert (of_policy["status"], of_policy["reason"]) == ("False", "TargetNotFound")
    assert (of_rewrite["status"], of_rewrite["reason"]) == ("Unknown", "TargetNotFound")
    assert "elsewhere" in of_policy["message"]
    assert "for InferencePool vlm" in of_rewrite["message"]
