"""The users of `bench.load.overload` on simulated servers:
two priorities, three tenants, one of which has eight tenths of the users."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from typing import Final

import pytest
from msgspec.structs import replace

from bench.routing.flow_router import FlowRouter
from epp.config.flow import Flow
from epp.config.policy import DEFAULT_POLICY
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Fleet, FleetPlan
from model_server.sim.prompts import Segment
from model_server.sim.request import Record, SimRequest

_UNTIL_S: Final = 80.0
_FLOW: Final = Flow(mode="Hold", deadline_seconds=5.0, objectives={"10": 10, "0": 0})


class Users:
    """A hundred, each of whom asks, thinks for a second and asks again, whatever the answer was."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._users: dict[int, int] = {}
        self._rng = random.Random(1)

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        return [(user / 20, self._request(user)) for user in range(100)]

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        user = self._users[record.request.request_id]
        return [(now + self._rng.uniform(0.5, 1.5), self._request(user))] if now < _UNTIL_S else []

    def _request(self, user: int) -> SimRequest:
        number = next(self._numbers)
        self._users[number] = user
        return SimRequest(
            request_id=number,
            segments=(Segment(10**7 + 2 * number, 3000),),
            answer=Segment(10**7 + 2 * number + 1, 60),
            tenant={0: "light-a", 1: "light-b"}.get(user % 10, "greedy"),
            priority=10 if user // 10 % 5 == 0 else 0,
        )


@pytest.fixture(scope="module")
def records() -> list[Record]:
    router = FlowRouter(replace(DEFAULT_POLICY, spec=replace(DEFAULT_POLICY.spec, flow=_FLOW)), seed=1)
    plan = FleetPlan(shape=EngineShape(num_blocks=2048, block_tokens=16), num_servers=2)
    rng = random.Random(1)
    return Fleet(plan, router=router, workload=Users(), rng=rng, gate=router).run().records


def test_each_tenant_gets_its_max_min_share_within_a_tenth(records: list[Record]) -> None:
    """All three ask for more than a third of what the higher priority leaves."""
    served: Counter[str] = Counter()
    for record in records:
        if (
            record.server
            and not record.request.priority
            and record.arrived_s < _UNTIL_S - _FLOW.deadline_seconds
        ):
            served[record.request.tenant] += record.num_prompt_tokens
    fair = served.total() / 3
    assert served.total() > 100_000
    assert all(abs(tokens - fair) <= 0.1 * fair for tokens in served.values()), served


def test_the_higher_priority_is_never_refused(records: list[Record]) -> None:
    assert all(record.server for record in records if record.request.priority)
