"""Which picker writes status, and when it stops: the requests that a picker sends to the API server."""

from __future__ import annotations

from typing import Any

import pytest

from epp.config.policy import DEFAULT_POLICY
from epp.sources.kube.api import Api, Query
from epp.sources.kube.live import Live, LiveEndpoint
from epp.sources.kube.objects import Condition, PolicyStatus
from epp.sources.kube.policies import PolicySet, ResolvedPolicies
from epp.sources.kube.policy_status import desired
from epp.sources.kube.writing import Writer
from tests.unit.sources.kube.objects import policy

LIVE = Live([LiveEndpoint("a:1", "vllm")])


class CountingServer(Api):
    """Accepts every write. The Lease is lost at write number `lasts`."""

    def __init__(self, *, lasts: int) -> None:
        super().__init__(None)
        self.wrote: list[str] = []
        self._lasts = lasts

    def holds(self) -> bool:
        return len(self.wrote) < self._lasts

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: object = None,
    ) -> bytes:
        self.wrote.append(f"{method} {path.rpartition('/ns/')[2]}")
        return b'{"metadata": {}}'


def outcome(names: str = "abc", *, pool: str = "vllm") -> ResolvedPolicies:
    policies = PolicySet(pools=[pool])
    for name in names:
        policies.put(policy(name, target=pool))
    return policies.resolve(default=DEFAULT_POLICY, existing=[pool])


def writer_to(server: Api, *pools: str) -> Writer:
    return Writer(
        server,
        namespace="ns",
        pools=pools or ["vllm"],
        identity="picker_0123abcd",
        interval_s=10.0,
        events=True,
        on_written=lambda _: None,
        time_text=lambda: "T",
    )


async def look(server: CountingServer) -> list[str]:
    writer = writer_to(server)
    await writer.look(outcome(), says={}, live=LIVE, pool_uids={"vllm": "u"}, holds=server.holds, now=1.0)
    writer.check_integrity()
    return server.wrote


async def test_the_holder_writes_every_status_and_an_event_for_each_policy() -> None:
    wrote = await look(CountingServer(lasts=100))
    statuses = [f"PATCH prefixroutingpolicies/{name}/status" for name in ("a", "b", "c")]
    assert wrote == [*statuses, *["POST events"] * 6], "each Event is written for the pool and for the policy"


async def test_a_picker_without_the_lease_writes_nothing() -> None:
    assert await look(CountingServer(lasts=0)) == []


async def test_a_lease_that_is_lost_between_two_writes_ends_them() -> None:
    assert await look(CountingServer(lasts=2)) == [
        f"PATCH prefixroutingpolicies/{name}/status" for name in ("a", "b")
    ]
    assert len(await look(CountingServer(lasts=5))) == 5


async def test_events_beyond_the_budget_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = CountingServer(lasts=100)
    writer = writer_to(server)
    for second in range(4):  # five statuses in a look, and an Event for each
        names = "abcdefghijklmnopqrst"[5 * second :][:5]
        await writer.look(
            outcome(names), says={}, live=LIVE, pool_uids={"vllm": "u"}, holds=server.holds, now=float(second)
        )
    written = [name for name in server.wrote if name == "POST events"]
    left_out = [r.getMessage() for r in caplog.records if "too many Events" in r.getMessage()]
    assert (len(written), len(left_out)) == (20, 10)
    assert left_out[-1].startswith(
        "too many Events; this Event was not written: PolicyRefused: policy t, generation 1: "
    )


async def test_name_of_an_event_is_valid_however_long_the_name_of_the_pool_is() -> None:
    names: list[str] = []

    class Taking(CountingServer):
        async def request(self, method: str, path: str, **more: Any) -> bytes:
            if path.endswith("/events"):
                names.append(more["body"]["metadata"]["name"])
            return await super().request(method, path, **more)

    pool = "p" * 199 + "-and-more"
    writer = writer_to(Taking(lasts=100), pool)
    judged = outcome("a", pool=pool)
    await writer.look(judged, says={}, live=LIVE, pool_uids={pool: "u"}, holds=lambda: True, now=1.0)
    start = "p" * 199 + ".0123abcd"
    assert names == [f"{start}.1", f"{start}.2", f"{start}.2.policy"], (
        "there are no endpoints; the policy routes"
    )


async def test_new_and_refused_policies_are_written_first() -> None:
    policies = PolicySet(pools=["vllm"])
    told = [f"p{n:02}" for n in range(40)]
    for name in told:
        policies.put(policy(name))
    policies.put(policy("z-bad", sessionHeader="host"))
    policies.put(policy("z-new"))
    known = PolicyStatus(observed_generation=0, conditions=(Condition(type="Accepted", status="True"),))
    says = dict.fromkeys([*told, "z-bad"], known)
    server = CountingServer(lasts=100)
    judged = policies.resolve(default=DEFAULT_POLICY, existing=["vllm"])
    await writer_to(server).look(
        judged, says=says, live=LIVE, pool_uids={"vllm": "u"}, holds=server.holds, now=1.0
    )
    patched = [line.split("/")[1] for line in server.wrote if line.startswith("PATCH")]
    assert (patched[:3], len(patched)) == (["p00", "z-bad", "z-new"], 20)


async def test_the_refused_of_200_new_policies_are_written_first() -> None:
    """The writer looks once a second."""
    policies = PolicySet(pools=["vllm"])
    refused = {f"bad{n:02}" for n in range(15)}
    for name in refused:
        policies.put(policy(name, sessionHeader="host"))
    for n in range(185):
        policies.put(policy(f"p{n:03}"))
    judged = policies.resolve(default=DEFAULT_POLICY, existing=["vllm"])
    server = CountingServer(lasts=10_000)
    writer = writer_to(server)
    said: dict[str, PolicyStatus] = {}
    looks: list[set[str]] = []
    while len(said) < 200:
        assert len(looks) < 10
        server.wrote.clear()
        await writer.look(
            judged, says=said, live=LIVE, pool_uids={"vllm": "u"}, holds=server.holds, now=float(len(looks))
        )
        told = {line.split("/")[1] for line in server.wrote if line.startswith("PATCH prefix")}
        looks.append(told)
        for name in told:
            verdict = judged.verdicts[name]
            said[name] = desired(verdict, before=PolicyStatus(), live=LIVE, hit_ratio=None, time_text="T")
    assert refused <= looks[0]


async def test_the_status_of_a_policy_that_no_picker_follows_says_so() -> None:
    policies = PolicySet(pools=["vllm"])
    policies.put(policy("moved", target="elsewhere", generation=2, status={"observedGeneration": 1}))
    policies.put(policy("theirs", target="elsewhere", status={"observedGeneration": 1}))
    bodies: list[Any] = []

    class Taking(CountingServer):
        async def request(self, method: str, path: str, **more: Any) -> bytes:
            bodies.append((path.rpartition("/ns/")[2], more["body"]))
            return await super().request(method, path, **more)

    server = Taking(lasts=100)
    writer = writer_to(server)

    async def look_at(now: float) -> None:
        nothing = policies.resolve(default=DEFAULT_POLICY, existing=["vllm"])
        await writer.look(
            nothing,
            says={},
            of_other_pools=policies.of_other_pools(),
            live=LIVE,
            pool_uids={"vllm": "u"},
            holds=server.holds,
            now=now,
        )

    await look_at(1.0)
    await look_at(3.0)
    assert bodies == []
    await look_at(4.5)
    ((path, body),) = bodies
    assert path == "prefixroutingpolicies/moved/status"
    assert body["metadata"] == {"uid": "uid-of-moved", "resourceVersion": "2"}, (
        "a status that somebody wrote meanwhile is not overwritten"
    )
    accepted, programmed = body["status"]["conditions"]
    assert (accepted["status"], accepted["reason"], programmed["status"]) == (
        "False",
        "TargetNotFound",
        "False",
    )
    assert "elsewhere" in accepted["message"]
    assert body["status"]["lastAccepted"] is body["status"]["hitRatio"] is None
    policies.put(policy("moved", target="elsewhere", generation=2, status={"observedGeneration": 2}))
    await look_at(50.0)
    assert len(bodies) == 1


async def test_an_event_refers_to_the_pool_that_it_is_about() -> None:
    regarding: list[tuple[str, str, str]] = []

    class Taking(CountingServer):
        async def request(self, method: str, path: str, **more: Any) -> bytes:
            if path.endswith("/events"):
                body, on = more["body"], more["body"]["involvedObject"]
                regarding.append((body["reason"], on["name"], on.get("uid", "")))
            return await super().request(method, path, **more)

    writer = writer_to(Taking(lasts=100), "a", "b")
    well = [LiveEndpoint("x:1", "a"), LiveEndpoint("y:1", "b")]
    ill = [well[0], LiveEndpoint("y:1", "b", "timeout")]
    for endpoints in (well, ill):
        await writer.look(
            outcome(""),
            says={},
            live=Live(endpoints),
            pool_uids={"a": "ua", "b": "ub"},
            holds=lambda: True,
            now=1.0,
        )
    assert regarding == [("EndpointEjected", "b", "ub"), ("NoEndpoints", "b", "ub")]
