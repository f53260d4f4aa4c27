"""What a status holds after the writer's merge patches, and which statuses of other releases stay."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec

from epp.config.policy import DEFAULT_POLICY
from epp.sources.kube.api import Api, Query, read
from epp.sources.kube.objects import PolicyObject
from epp.sources.kube.policies import PolicySet
from epp.sources.kube.reflector import ListSource, Reflector
from epp.sources.kube.statuses import StatusWriter, Unclaimed, due

Json = dict[str, Any]
EMPTY_MAPS: Json = {"ttlByPriority": {}, "objectives": {}, "models": {}, "paths": {}}


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


def an_object(*, target: str = "vllm", generation: int = 1, status: Json | None = None, **spec: Any) -> Json:
    return {
        "metadata": {
            "name": "p",
            "uid": "u",
            "generation": generation,
            "resourceVersion": "5",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"targetRef": {"name": target}, **spec},
        "status": status or {},
    }


class Merging(Api):
    """An API server that holds one policy, and merges the patches of its status."""

    def __init__(self, policy: Json) -> None:
        super().__init__(None)
        self.policy = policy
        self.patches = 0
        self._policies = PolicySet(pools=["vllm"])
        self._writer = StatusWriter(self)
        self._unclaimed = Unclaimed()
        self._now = 0.0

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: object = None,
    ) -> bytes:
        if method != "PATCH":
            return b"{}"
        assert isinstance(body, dict)
        self.patches += 1
        self.policy["status"] = merged(self.policy["status"], body["status"])
        self._seen()
        return json.dumps(self.policy).encode()

    def _seen(self) -> None:
        found = reflector().read(msgspec.Raw(json.dumps(self.policy).encode()))
        assert found is not None
        self._policies.put(found)

    async def look_for_30_s(self) -> None:
        """Let the writer look at the object each second."""
        self._seen()
        for _ in range(30):
            self._now += 1.0
            writes = due(
                self._policies.resolve(default=DEFAULT_POLICY, existing=["vllm"]),
                self._policies,
                unclaimed=self._unclaimed,
                namespace="ns",
                time_text="T",
                now=self._now,
            )
            await self._writer.look(writes, now=self._now)


def reflector() -> Reflector[PolicyObject]:
    source = ListSource("policies", PolicyObject, "/policies")
    return Reflector(None, source, sink=None, on_change=lambda: None, on_state=lambda *_: None, rng=Random(1))  # type: ignore[arg-type]


async def test_fields_that_a_newer_spec_lacks_are_removed() -> None:
    server = Merging(an_object(rule="random", flow={"mode": "Hold", "objectives": {"a": 1}}))
    await server.look_for_30_s()
    server.policy |= an_object(generation=2, status=server.policy["status"])
    server.patches = 0
    await server.look_for_30_s()
    assert server.policy["status"]["lastAccepted"]["spec"] == {"targetRef": {"name": "vllm"}}
    assert server.patches == 1, "a status that has not changed is not written again"
    refused = an_object(generation=3, status=server.policy["status"], rule="nonsense")
    after_restart = PolicySet(pools=["vllm"])
    after_restart.put(read(json.dumps(refused).encode(), PolicyObject))
    acting = after_restart.resolve(default=DEFAULT_POLICY, existing=["vllm"]).acting
    assert (acting.spec.rule, acting.spec.flow.mode) == ("least-cost", "Direct")


async def test_a_status_with_empty_maps_of_an_earlier_release_is_written_once() -> None:
    stored = {"targetRef": {"name": "vllm"}, "flow": {"mode": "Hold", **EMPTY_MAPS}}
    status = {"lastAccepted": {"generation": 1, "spec": stored}}
    server = Merging(an_object(status=status, flow={"mode": "Hold"}))
    await server.look_for_30_s()
    assert server.patches == 1


async def test_status_of_another_pool_with_a_field_of_another_type_is_left_alone() -> None:
    status = {"observedGeneration": 1, "saturation": 0.5}
    server = Merging(an_object(target="other", status=status))
    await server.look_for_30_s()
    assert server.patches == 0
    assert server.policy["status"] == status


def test_the_last_accepted_spec_routes_beside_unreadable_fields() -> None:
    accepted = {"targetRef": {"name": "vllm"}, "rule": "affinity"}
    status = {"saturation": 0.5, "lastAccepted": {"generation": 1, "spec": accepted}}
    refused = an_object(generation=2, status=status, rule="nonsense")
    found = reflector().read(msgspec.Raw(json.dumps(refused).encode()))
    assert found is not None
    policies = PolicySet(pools=["vllm"])
    policies.put(found)
    assert policies.resolve(default=DEFAULT_POLICY, existing=["vllm"]).acting.spec.rule == "affinity"
