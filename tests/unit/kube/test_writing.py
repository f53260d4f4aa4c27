"""Who writes status, and when it stops: the requests that a picker sends to the API server."""

from __future__ import annotations

from typing import Any

import pytest

from epp.kube.api import Api, Query
from epp.kube.live import Live, LiveEndpoint
from epp.kube.policies import Outcome, PolicySet
from epp.kube.writing import Place, Writer
from epp.policy import DEFAULT_POLICY
from tests.unit.kube.objects import policy

LIVE = Live([LiveEndpoint("a:1")])
PLACE = Place(namespace="ns", pool="vllm", identity="picker_0123abcd")


class Server(Api):
    """Takes every write; the Lease is lost with the `lasts`-th."""

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
        content_type: str = "application/json",
    ) -> bytes:
        self.wrote.append(f"{method} {path.rpartition('/ns/')[2]}")
        return b'{"metadata": {}}'


def outcome(names: str = "abc") -> Outcome:
    policies = PolicySet(pool="vllm")
    for name in names:
        policies.put(policy(name))
    return policies.resolve(default=DEFAULT_POLICY, pool_exists=True)


def writer_to(server: Server) -> Writer:
    return Writer(
        server, PLACE, interval_s=10.0, events=True, on_written=lambda _: None, time_text=lambda: "T"
    )


async def look(server: Server) -> list[str]:
    writer = writer_to(server)
    await writer.look(outcome(), says={}, live=LIVE, pool_uid="u", holds=server.holds, now=1.0)
    writer.check_integrity()
    return server.wrote


async def test_the_holder_writes_every_status_and_tells_of_what_routes_and_what_does_not() -> None:
    wrote = await look(Server(lasts=100))
    statuses = [f"PATCH prefixroutingpolicies/{name}/status" for name in ("a", "b", "c")]
    assert wrote == [*statuses, *["POST events"] * 3]


async def test_who_does_not_hold_the_lease_writes_nothing() -> None:
    assert await look(Server(lasts=0)) == []


async def test_a_lease_that_is_lost_between_two_writes_ends_them() -> None:
    assert await look(Server(lasts=2)) == [
        f"PATCH prefixroutingpolicies/{name}/status" for name in ("a", "b")
    ]
    assert len(await look(Server(lasts=4))) == 4


async def test_events_that_are_too_many_stand_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(lasts=100)
    writer = writer_to(server)
    for second in range(4):  # five statuses in a look, and an Event for each
        names = "abcdefghijklmnopqrst"[5 * second :][:5]
        await writer.look(
            outcome(names), says={}, live=LIVE, pool_uid="u", holds=server.holds, now=float(second)
        )
    written = [name for name in server.wrote if name == "POST events"]
    left_out = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert (len(written), len(left_out)) == (10, 10)
    assert left_out[-1].startswith("too many Events, left out: PolicyRefused: policy t, generation 1: ")


async def test_the_name_of_an_event_is_a_valid_one_however_long_the_pools_is() -> None:
    names: list[str] = []

    class Taking(Server):
        async def request(self, method: str, path: str, **more: Any) -> bytes:
            if path.endswith("/events"):
                names.append(more["body"]["metadata"]["name"])
            return await super().request(method, path, **more)

    place = Place(namespace="ns", pool="p" * 199 + "-and-more", identity="picker_0123abcd")
    writer = Writer(
        Taking(lasts=100), place, interval_s=10.0, events=True, on_written=lambda _: None, time_text=str
    )
    await writer.look(outcome("a"), says={}, live=LIVE, pool_uid="u", holds=lambda: True, now=1.0)
    assert names == ["p" * 199 + ".0123abcd.1"]
