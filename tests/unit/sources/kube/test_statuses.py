"""What the statuses of policies and rewrites hold after merge patches, and when they are written."""

import json
from random import Random
from typing import Any

import msgspec
import pytest

from epp.config.policy import DEFAULT_POLICY, Policy
from epp.sources.kube.api import Api, ApiError, Query
from epp.sources.kube.llmd import ModelRewrites, judge_rewrites
from epp.sources.kube.objects import Condition, PolicyObject
from epp.sources.kube.policies import PolicySet
from epp.sources.kube.reflector import Access, Reflector
from epp.sources.kube.statuses import StatusWriter
from tests.unit.sources.kube.objects import policy, rewrite, rewrites_of, rule

Json = dict[str, Any]


class StatusServer(Api):
    """Records the writes, and answers all with one status."""

    def __init__(self, *, answers: int = 200) -> None:
        super().__init__(None)
        self.wrote: list[tuple[str, Any]] = []
        self._answers = answers

    async def request(self, method: str, path: str, *, query: Query = (), body: Any = None) -> bytes:
        self.wrote.append((f"{method} {path.rpartition('/namespaces//')[2]}", body))
        if self._answers != 200:
            raise ApiError("no", status=self._answers)
        return b"{}"

    @property
    def places(self) -> list[str]:
        return [place for place, _ in self.wrote]


class Replica:
    """The part of a picker that judges and writes."""

    def __init__(self, server: Api, *found: PolicyObject, rewrites: ModelRewrites | None = None) -> None:
        self.policies = PolicySet(pools=["vllm"])
        self._rewrites = [rewrites] if rewrites is not None else []
        self._writer = StatusWriter(server)
        self.policies.claims.replace(found)

    async def look(self, *times: float, time_text: str = "T") -> Policy:
        """Judge and write at these times. Return the policy that routes."""
        outcome = self.policies.resolve(default=DEFAULT_POLICY, existing=["vllm"])
        judged = judge_rewrites(self._rewrites, existing=["vllm"], served=None)
        wanted = [*self.policies.wanted(outcome), *judged]
        for now in times:
            await self._writer.look(wanted, now=now, time_text=time_text)
        return outcome.acting


async def test_statuses_that_differ_are_written_with_the_version_that_was_read() -> None:
    server = StatusServer()
    others = Condition("Seen", "True", "R")
    found = rewrites_of(rewrite("r", rule("gpt"), conditions=(others,)))
    await Replica(server, policy("a"), rewrites=found).look(1.0)
    assert server.places == [
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
async def test_the_same_result_is_sent_again_after_pauses_that_grow(answers: int) -> None:
    """The watch tells of a write that succeeded. Here it is silent, as with a CRD that drops a field."""
    server = StatusServer(answers=answers)
    replica = Replica(server, policy("a"))
    await replica.look(1.0, 2.0, 5.9, 6.1, 7.0, 16.0)
    assert len(server.wrote) == 2
    await replica.look(*(float(n) for n in range(17, 617)))
    assert len(server.wrote) == 13, "at last once a minute"


async def test_another_result_is_written_at_the_next_look() -> None:
    server = StatusServer()
    replica = Replica(server, policy("a"))
    await replica.look(1.0)
    replica.policies.claims.put(policy("a", generation=2, sessionHeader="host"))
    await replica.look(2.0)
    assert [body["status"]["conditions"][0]["reason"] for _, body in server.wrote] == ["Accepted", "Invalid"]


async def test_a_look_writes_a_portion_and_the_others_follow() -> None:
    server = StatusServer()
    replica = Replica(server, *(policy(f"p{n:02}") for n in range(42)))
    await replica.look(1.0)
    assert len(server.wrote) == 20
    await replica.look(2.0, 3.0)
    assert len(server.wrote) == 42


async def test_each_object_has_its_turn_however_many_writes_fail() -> None:
    server = StatusServer(answers=500)
    replica = Replica(server, *(policy(f"p{n:03}") for n in range(200)))
    await replica.look(*(float(n) for n in range(10)))
    assert len({*server.places}) == 200


async def test_a_policy_for_a_pool_without_a_picker_is_marked() -> None:
    server = StatusServer()
    accepted = {"generation": 1, "spec": {"targetRef": {"name": "vllm"}}}
    judged = {"observedGeneration": 1, "saturation": 0.5, "lastAccepted": accepted}
    replica = Replica(
        server,
        policy("moved", target="elsewhere", generation=2, status=judged),
        policy("theirs", target="elsewhere", status=judged),
    )
    await replica.look(0.0, 1.5)
    assert server.wrote == [], "a picker that serves the pool is faster"
    await replica.look(2.5)
    assert server.places == ["PATCH prefixroutingpolicies/moved/status"]
    (condition, _) = server.wrote[0][1]["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "TargetNotFound")
    assert "elsewhere" in condition["message"]
    assert server.wrote[0][1]["status"]["lastAccepted"] is None


def merged(old: Any, change: Any) -> Any:
    """Merge a patch by RFC 7396."""
    if not isinstance(change, dict):
        return change
    kept = dict(old) if isinstance(old, dict) else {}
    for name, value in change.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = merged(kept.get(name), value)
    return kept


def an_object(*, generation: int = 1, status: Json | None = None, **spec: Any) -> Json:
    metadata = {"name": "p", "uid": "u", "generation": generation, "resourceVersion": "5"}
    return {"metadata": metadata, "spec": {"targetRef": {"name": "vllm"}, **spec}, "status": status or {}}


class Merging(Api):
    """An API server that holds one policy and merges the patches of its status, and a replica that watches
    it.
    """

    def __init__(self, policy: Json) -> None:
        super().__init__(None)
        self.policy = policy
        self.patches = 0
        self._replica = Replica(self)
        self._now = 0.0

    async def request(self, method: str, path: str, *, query: Query = (), body: object = None) -> bytes:
        assert isinstance(body, dict)
        self.patches += 1
        self.policy["status"] = merged(self.policy["status"], body["status"])
        return b"{}"

    async def change(self, policy: Json, *, time_text: str = "T") -> Json:
        """Change the object, and let the replica look for some seconds. Return the status after that."""
        self.policy = policy
        for _ in range(12):
            self._replica.policies.claims.put(as_read(self.policy))
            self._now += 1.0
            await self._replica.look(self._now, time_text=time_text)
        status: Json = self.policy["status"]
        return status


async def following(policy: Json) -> tuple[Merging, Json]:
    server = Merging(policy)
    return server, await server.change(policy)


def as_read(policy: Json) -> PolicyObject:
    """Return the object as the reflector reads it."""
    access: Any = Access(None, "n", lambda *_: None, None, Random(1), None)  # type: ignore[arg-type]
    reflector: Reflector[PolicyObject] = Reflector(
        access, PolicySet(pools=["vllm"]).claims, on_change=lambda: None
    )
    found = reflector.read(msgspec.Raw(json.dumps(policy).encode()))
    assert found is not None
    return found


async def test_the_status_has_conditions_and_the_accepted_fields() -> None:
    server, seen = await following(an_object(generation=4, rule="affinity"))
    assert server.patches == 1, "a status that has not changed is not written again"
    assert seen["observedGeneration"] == 4
    assert [(c["type"], c["status"], c["reason"], c["observedGeneration"]) for c in seen["conditions"]] == [
        ("Accepted", "True", "Accepted", 4),
        ("Programmed", "True", "Programmed", 4),
    ]
    spec = {"targetRef": {"name": "vllm"}, "rule": "affinity"}
    assert seen["lastAccepted"] == {"generation": 4, "spec": spec}, "only the fields that were set"
    assert (seen["rule"], seen["mode"]) == ("affinity", "Enforce")


async def test_the_time_of_a_condition_is_that_of_its_last_change() -> None:
    server, _ = await following(an_object())

    async def times(policy: Json) -> set[str]:
        seen = await server.change({**policy, "status": server.policy["status"]}, time_text="T2")
        return {condition["lastTransitionTime"] for condition in seen["conditions"]}

    assert await times(an_object(generation=2, rule="random")) == {"T"}
    assert await times(an_object(generation=3, sessionHeader="host")) == {"T2"}


async def test_fields_that_a_newer_spec_lacks_are_removed() -> None:
    server, status = await following(an_object(rule="random", flow={"mode": "Hold", "objectives": {"a": 1}}))
    seen = await server.change(an_object(generation=2, status=status))
    assert seen["lastAccepted"]["spec"] == {"targetRef": {"name": "vllm"}}
    assert server.patches == 2
    refused = an_object(generation=3, status=seen, rule="nonsense")
    acting = await Replica(StatusServer(), as_read(refused)).look()
    assert (acting.spec.rule, acting.spec.flow.mode) == ("least-cost", "Direct")


async def test_a_status_with_empty_maps_of_an_earlier_release_is_written_once() -> None:
    empty: Json = {"ttlByPriority": {}, "objectives": {}, "models": {}}
    stored = {"targetRef": {"name": "vllm"}, "flow": {"mode": "Hold", **empty}}
    status = {"lastAccepted": {"generation": 1, "spec": stored}}
    server, _ = await following(an_object(status=status, flow={"mode": "Hold"}))
    assert server.patches == 1


async def test_what_a_newer_picker_accepted_stays_in_the_status() -> None:
    newer = {"generation": 1, "spec": {"targetRef": {"name": "vllm"}, "ofTheNextRelease": True}}
    _, seen = await following(an_object(ofTheNextRelease=False, status={"lastAccepted": newer}))
    assert seen["conditions"][0]["reason"] == "Invalid"
    assert seen["lastAccepted"] == newer


async def test_the_last_accepted_spec_routes_beside_unreadable_fields() -> None:
    accepted = {"targetRef": {"name": "vllm"}, "rule": "affinity"}
    status = {"saturation": 0.5, "lastAccepted": {"generation": 1, "spec": accepted}}
    refused = an_object(generation=2, status=status, rule="nonsense")
    acting = await Replica(StatusServer(), as_read(refused)).look()
    assert acting.spec.rule == "affinity"
