"""The requests with which a picker takes, renews and gives back its Lease, and what happens if they fail."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from epp.sources.kube.api import Api, ApiError, Query
from epp.sources.kube.lease_holder import LeaseHolder
from tests.harness.clock import Clock
from tests.harness.processes import wait_until
from tests.harness.tasks import running_task


class LeaseServer(Api):
    """Holds one Lease. A write must name the version that is stored."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lease: dict[str, Any] | None = None
        self.fault: ApiError | None = None
        """The answer to every request, if there is one."""
        self.asked: list[str] = []
        self._version = 0

    async def request(self, method: str, path: str, *, query: Query = (), body: Any = None) -> bytes:
        self.asked.append(f"{method} {path.rpartition('/namespaces/')[2]}")
        if self.fault is not None:
            raise self.fault
        if method == "GET":
            if self.lease is None:
                raise ApiError("not found", status=404)
            return json.dumps(self.lease).encode()
        stored = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if body["metadata"].get("resourceVersion") != stored:
            raise ApiError("conflict", status=409)
        self._version += 1
        self.lease = body | {"metadata": body["metadata"] | {"resourceVersion": str(self._version)}}
        return json.dumps(self.lease).encode()

    @property
    def holder(self) -> str:
        return self.lease["spec"]["holderIdentity"] if self.lease else ""


def holder_of(server: LeaseServer, clock: Clock, *, name: str = "me", owner: Any = None) -> LeaseHolder:
    return LeaseHolder(
        server,
        namespace="n",
        name="lease",
        identity=name,
        duration_s=0.06,
        clock=clock,
        time_text=lambda: "T",
        rng=Random(1),
        owner=owner,
    )


async def until_asked(server: LeaseServer, times: int) -> None:
    """Wait until the server has got this many more requests."""
    wanted = len(server.asked) + times
    await wait_until(lambda: len(server.asked) >= wanted, what=f"{times} requests")


async def test_a_missing_lease_is_created_then_renewed_and_given_back_at_the_end() -> None:
    server, account = LeaseServer(), {"kind": "ServiceAccount", "name": "epp"}
    holder = holder_of(server, Clock(), owner=account)
    assert not holder.holds()
    async with running_task(holder.run):
        await until_asked(server, 4)
        assert holder.holds()
        assert server.holder == "me"
        assert server.lease is not None
        assert server.lease["metadata"]["ownerReferences"] == [account]
    assert server.asked[:4] == [
        "GET n/leases/lease",
        "POST n/leases",
        "GET n/leases/lease",
        "PUT n/leases/lease",
    ]
    assert server.holder == "", "the next holder does not wait until the lease expires"


async def test_a_waiting_replica_does_not_change_the_lease_when_it_ends() -> None:
    server, clock = LeaseServer(), Clock()
    first, second = holder_of(server, clock, name="first"), holder_of(server, clock, name="second")
    async with running_task(first.run):
        await until_asked(server, 2)
        async with running_task(second.run):
            await until_asked(server, 8)
            assert (first.holds(), second.holds()) == (True, False)
        assert server.holder == "first"


async def test_without_answers_the_holder_ends_after_two_thirds_of_the_duration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, clock = LeaseServer(), Clock()
    holder = holder_of(server, clock)
    async with running_task(holder.run):
        await until_asked(server, 2)
        server.fault = ApiError("no answer in time")
        await until_asked(server, 3)
        assert holder.holds(), "a failed renewal alone changes nothing"
        clock.now += 0.05
        assert not holder.holds()
        await until_asked(server, 3)
    complaints = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert complaints == ["cannot get lease lease, so this picker writes no status: no answer in time"], (
        "each reason is logged once"
    )
    assert not server.asked[-1].startswith("PUT"), "a lease that is no longer held is not given back"


async def test_a_replica_that_was_slower_than_another_does_not_hold_the_lease() -> None:
    class Slower(LeaseServer):
        async def request(self, method: str, path: str, **more: Any) -> bytes:
            if method == "POST":
                raise ApiError("already exists", status=409)
            return await super().request(method, path, **more)

    server = Slower()
    holder = holder_of(server, Clock())
    async with running_task(holder.run):
        await until_asked(server, 2)
        assert not holder.holds()
