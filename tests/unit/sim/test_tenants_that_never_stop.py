"""The users of `bench.load.overload` on simulated servers: two priorities and three tenants, one of which
has eight tenths of the users.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from typing import Final

import pytest
from msgspec.structs import replace

from bench.routing.flow import FlowRouter
from epp.config.flow import Flow
from epp.config.policy import DEFAULT_POLICY
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Fleet, FleetPlan
from model_server.sim.prompts import Segment
from model_server.sim.request import Record, SimRequest

pytestmark = pytest.mark.slow

_UNTIL_S: Final = 80.0
_FLOW: Final = Flow(mode="Hold", deadline_seconds=5.0, objectives={"10": 10, "0": 0})


class Users:
    """A hundred users. Each sends a request, thinks for a second after the answer, and sends the next,
    whatever the answer was.
    """

    def __init__(self, *, until_s: float, long_answers: bool = False) -> None:
        """long_answers: two tenants with as many users each; `light-a` has answers twenty times as long."""
        self._until_s = until_s
        self._long_answers = long_answers
        self._numbers = itertools.count()
        self._users: dict[int, int] = {}
        self._rng = random.Random(1)

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        return [(user / 20, self._request(user)) for user in range(100)]

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        user = self._users[record.request.request_id]
        return [(now + self._rng.uniform(0.5, 1.5), self._request(user))] if now < self._until_s else []

    def _request(self, user: int) -> SimRequest:
        number = next(self._numbers)
        self._users[number] = user
        tenant = {0: "light-a", 1: "light-b"}.get(user % 10, "greedy")
        if self._long_answers:
            tenant = ("light-a", "light-b")[user % 2]
        answer_tokens = 1200 if self._long_answers and tenant == "light-a" else 60
        return SimRequest(
            request_id=number,
            segments=(Segment(10**7 + 2 * number, 3000),),
            answer=Segment(10**7 + 2 * number + 1, answer_tokens),
            tenant=tenant,
            priority=10 if user // 10 % 5 == 0 and not self._long_answers else 0,
        )


def _run(flow: Flow, users: Users) -> list[Record]:
    spec = replace(DEFAULT_POLICY.spec, flow=flow, sampling=replace(DEFAULT_POLICY.spec.sampling, share=0.1))
    policy = replace(DEFAULT_POLICY, spec=spec)
    router = FlowRouter(policy, seed=1)
    shape = EngineShape(num_blocks=2048, block_tokens=16)
    plan = FleetPlan(shape=shape, num_servers=2)
    return Fleet(plan, router=router, workload=users, rng=random.Random(1), gate=router).run().records


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return _run(_FLOW, Users(until_s=_UNTIL_S))


def test_each_tenant_gets_its_max_min_share_within_a_tenth(records: list[Record]) -> None:
    """Each of the three asks for more than a third of what the higher priority leaves."""
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


def test_no_request_of_the_higher_priority_is_refused(records: list[Record]) -> None:
    high = [record for record in records if record.request.priority]
    assert high
    assert all(record.server for record in high)


def test_a_tenant_of_long_answers_gets_its_share_and_no_more() -> None:
    """Both tenants ask for more than half. A token of an answer counts twice, as it is charged."""
    until_s = 160.0
    users = Users(until_s=until_s, long_answers=True)
    records = _run(Flow(mode="Hold", ttl_seconds=3600), users)
    had: Counter[str] = Counter()
    for record in records:
        if record.server and until_s / 4 < (record.first_token_s or until_s) < until_s:
            had[record.request.tenant] += record.num_prompt_tokens + 2 * record.request.answer.num_tokens
    assert abs(had["light-a"] - had["light-b"]) <= 0.1 * had.total() / 2, had
