"""Which picker holds the Lease. The clocks of the pickers may differ."""

from __future__ import annotations

import random

from epp.sources.kube.lease import Election
from epp.sources.kube.objects import Lease, LeaseSpec, ObjectMeta


class Candidates:
    """Several elections for one lease. As at the API server, a write must name the version that was read."""

    def __init__(self, *names: str, duration_s: float = 15.0) -> None:
        self.lease: Lease | None = None
        self.version = 0
        self.elections = {n: Election(identity=n, duration_s=duration_s) for n in names}

    def read(self) -> tuple[Lease | None, int]:
        return self.lease, self.version

    def act(self, name: str, read: tuple[Lease | None, int], *, now: float) -> str:
        """Let one candidate decide by the lease that it has read, and write."""
        election = self.elections[name]
        lease, version = read
        step = election.step(lease, now=now)
        if step == "wait":
            return step
        if version != self.version:
            election.lost()
            return "conflict"
        self.version += 1
        spec = election.spec(step, time_text=f"T{now}.{self.version}")
        self.lease = Lease(metadata=ObjectMeta(name="l", resource_version=str(self.version)), spec=spec)
        election.renewed(sent_at=now)
        return step

    def turn(self, name: str, *, now: float) -> str:
        return self.act(name, self.read(), now=now)

    def holders(self, *, now: float) -> list[str]:
        return [name for name, election in self.elections.items() if election.holds(now=now)]


def test_the_first_candidate_creates_the_lease_and_the_second_waits() -> None:
    two = Candidates("a", "b")
    assert two.turn("a", now=0.0) == "create"
    assert two.turn("b", now=1.0) == "wait"
    assert two.holders(now=1.0) == ["a"]


def test_the_holder_renews_the_lease_and_keeps_its_acquire_time() -> None:
    one = Candidates("a")
    one.turn("a", now=0.0)
    acquired = one.lease.spec.acquire_time if one.lease else None
    assert one.turn("a", now=3.0) == "renew"
    assert one.lease is not None
    assert one.lease.spec.acquire_time == acquired
    assert one.lease.spec.lease_transitions == 0


def test_a_lease_that_is_not_renewed_is_taken_after_its_time() -> None:
    two = Candidates("a", "b")
    two.turn("a", now=0.0)
    assert two.turn("b", now=1.0) == "wait"
    assert two.turn("b", now=15.9) == "wait", "it was first seen at 1"
    assert two.turn("b", now=16.1) == "take"
    assert two.holders(now=16.1) == ["b"]
    assert two.lease is not None
    assert two.lease.spec.lease_transitions == 1


def test_a_lease_that_is_renewed_is_not_taken() -> None:
    two = Candidates("a", "b")
    for now in range(0, 60, 3):
        two.turn("a", now=now)
        assert two.turn("b", now=now + 1) == "wait"


def test_a_lease_given_back_is_taken_at_once() -> None:
    two = Candidates("a", "b")
    two.turn("a", now=0.0)
    two.turn("b", now=1.0)
    assert two.lease is not None
    two.lease = Lease(
        metadata=two.lease.metadata, spec=LeaseSpec(holder_identity="", lease_duration_seconds=1)
    )
    assert two.turn("b", now=2.0) == "take"


def test_a_holder_that_cannot_renew_stops_before_another_may_begin() -> None:
    one = Candidates("a")
    one.turn("a", now=0.0)
    assert one.holders(now=9.9) == ["a"]
    assert one.holders(now=10.0) == []


def test_when_two_candidates_create_the_lease_together_one_gets_a_conflict() -> None:
    two = Candidates("a", "b")
    read = two.read()
    assert two.act("a", read, now=0.0) == "create"
    assert two.act("b", read, now=0.0) == "conflict"
    assert two.holders(now=0.0) == ["a"]


def test_two_candidates_never_hold_lease_at_once_however_they_are_delayed() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        names = ("a", "b", "c")
        three = Candidates(*names)
        now = 0.0
        late: list[tuple[str, tuple[Lease | None, int]]] = []
        for _ in range(60):
            now += rng.uniform(0.0, 8.0)
            name = rng.choice(names)
            if rng.random() < 0.3:
                late.append((name, three.read()))
            elif late and rng.random() < 0.3:
                slow, read = late.pop(0)
                three.act(slow, read, now=now)
            else:
                three.turn(name, now=now)
            assert len(three.holders(now=now)) <= 1, (seed, now)
