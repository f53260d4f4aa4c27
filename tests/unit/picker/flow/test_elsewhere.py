"""Several pickers, each with its own queue, report to each other what waits and what went. Bounds and
shares hold for the pool.

There is one fleet, and every picker knows at once what was sent to it. Reports of queues take 0.1 s, as
over a link that is flushed every 50 ms.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.flow import Flow, WaitingSettings
from epp.picker.flow.elsewhere import Elsewhere, Reported, Row
from epp.picker.flow.queues import QueueLoad
from tests.unit.picker.flow.a_fleet import AFleet, Ask, FlowGateway

PICKERS = 4
SERVERS = 4
STEP_S = 0.025
NEWS_S = 0.1


class Pool:
    def __init__(self, settings: Flow) -> None:
        self.fleet = AFleet(SERVERS)
        self.fleet.busy_until = [1.0] * SERVERS
        self.gates = [FlowGateway(settings, self.fleet) for _ in range(PICKERS)]
        self.reported = [Reported() for _ in range(PICKERS)]
        self.under_way: deque[tuple[float, int, list[Row]]] = deque()
        self.now = 0.0

    def step(self) -> None:
        while self.under_way and self.under_way[0][0] <= self.now:
            _, reporter, rows = self.under_way.popleft()
            for number, gate in enumerate(self.gates):
                if number != reporter:
                    gate.flow.take_reports(bytes([reporter]), rows, now=self.now)
        for number, (gate, reported) in enumerate(zip(self.gates, self.reported, strict=True)):
            gate.run(now=self.now, until=self.now)
            rows = list(reported.rows(gate.flow.loads(), gate.flow.take_charges(), anew=False))
            self.under_way.append((self.now + NEWS_S, number, rows))
            gate.flow.check_integrity()
        self.now += STEP_S

    def waiting(self) -> Counter[int]:
        """Return the waiting requests by priority."""
        counted: Counter[int] = Counter()
        for gate in self.gates:
            counted.update({priority: load.requests for priority, load in gate.flow.waiting().items()})
        return counted

    def let_go_tokens(self) -> Counter[str]:
        had: Counter[str] = Counter()
        for gate in self.gates:
            for item in gate.let_go:
                had[item.tenant] += item.payload.tokens
        return had


@pytest.mark.slow
def test_a_bound_holds_for_all_pickers_together_within_a_tenth() -> None:
    pool, rng = Pool(Flow(in_all=WaitingSettings(max_requests=100))), random.Random(1)
    most = 0
    while pool.now < 20:
        for _ in range(2):  # twice as much as the servers can do
            pool.gates[rng.randrange(PICKERS)].offer(Ask(100), now=pool.now)
        pool.step()
        most = max(most, pool.waiting().total())
    assert 90 <= most <= 110
    assert 90 <= pool.waiting().total() <= 110


@pytest.mark.slow
def test_a_tenants_bound_holds_for_all_pickers_together() -> None:
    pool = Pool(Flow(per_tenant=WaitingSettings(max_requests=200)))
    while pool.now < 5:
        for gate in pool.gates[: 1 + int(pool.now)]:
            gate.offer(Ask(100), tenant="greedy", now=pool.now)
        pool.step()
        assert pool.waiting().total() <= 220
    assert pool.waiting().total() >= 180


@pytest.mark.slow
@pytest.mark.parametrize("lopsided", [False, True])
def test_tenants_share_what_all_pickers_let_go_within_a_tenth(*, lopsided: bool) -> None:
    """`lopsided`: the light tenants use two of the pickers, the greedy tenant uses all."""
    pool, rng = Pool(Flow(per_tenant=WaitingSettings(max_requests=400))), random.Random(2)
    light = ["a", "b", "c"]
    while pool.now < 15:
        for tenant in light:
            if rng.random() < 0.3:  # more than a quarter of what the servers can do
                pool.gates[rng.randrange(2 if lopsided else PICKERS)].offer(
                    Ask(100), tenant=tenant, now=pool.now
                )
        for _ in range(3):
            pool.gates[rng.randrange(PICKERS)].offer(Ask(100), tenant="greedy", now=pool.now)
        pool.step()
    had = pool.let_go_tokens()
    fair = had.total() / 4
    assert all(0.9 * fair <= had[tenant] <= 1.1 * fair for tenant in (*light, "greedy")), had


def test_the_more_pressing_request_goes_first_at_whichever_picker_it_waits() -> None:
    pool = Pool(Flow())
    for _ in range(20):
        pool.gates[0].offer(Ask(500), now=0.0)
        pool.gates[1].offer(Ask(500), priority=5, now=0.0)
    while pool.waiting()[5]:
        pool.step()
    assert len(pool.gates[0].let_go) <= SERVERS


def test_the_reports_of_a_picker_are_forgotten_with_it() -> None:
    elsewhere = Elsewhere()
    elsewhere.replace(b"a", Row(2, "t", 0, 3, 30, 300))
    elsewhere.replace(b"b", Row(1, "t", 0, 1, 10, 100))
    assert elsewhere.in_all.as_tuple() == (4, 40, 400)
    assert elsewhere.waits_above(1)
    elsewhere.forget(b"a")
    assert elsewhere.in_all.as_tuple() == (1, 10, 100)
    assert not elsewhere.waits_above(1)
    assert elsewhere.waits_above(0)
    elsewhere.check_integrity()


def test_only_changes_are_reported_unless_everything_is_reported_anew() -> None:
    reported = Reported()
    waiting = {(0, "a"): QueueLoad(2, 20, 200), (0, "b"): QueueLoad(1, 10, 100)}
    assert len(reported.rows(waiting, {}, anew=False)) == 2
    assert reported.rows(waiting, {}, anew=False) == []
    assert reported.rows(waiting, {(0, "a"): 50}, anew=False) == [Row(0, "a", 50, 2, 20, 200)]
    assert len(reported.rows(waiting, {}, anew=True)) == 2
    assert {row.requests for row in reported.rows({}, {}, anew=False)} == {0}


rows = st.builds(
    Row,
    priority=st.integers(0, 2),
    tenant=st.sampled_from("ab"),
    let_go_tokens=st.integers(0, 1),
    requests=st.integers(0, 3),
    size_bytes=st.integers(0, 9),
    tokens=st.integers(0, 9),
)


@pytest.mark.slow
@given(reports=st.lists(st.tuples(st.sampled_from([b"x", b"y"]), rows | st.none()), max_size=30))
def test_the_sums_equal_the_rows_for_any_reports(reports: list[tuple[bytes, Row | None]]) -> None:
    elsewhere = Elsewhere()
    for picker, row in reports:
        if row is None:
            elsewhere.forget(picker)
        else:
            elsewhere.replace(picker, replace_tokens(row))
        elsewhere.check_integrity()


def replace_tokens(row: Row) -> Row:
    """A request has at least one token."""
    return row._replace(tokens=max(row.tokens, row.requests))
