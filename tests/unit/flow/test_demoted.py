"""Late requests that are demoted: when they go, and which servers they leave to others."""

from __future__ import annotations

import pytest

from epp.flow.control import FlowControl
from epp.flow.demoted import Demoted
from epp.flow.elsewhere import Elsewhere
from epp.flow.flow_settings import FlowSettings
from epp.flow.queues import Queues
from epp.flow.request import Forecast, Pool
from tests.unit.flow.a_fleet import SECOND, AFleet, Ask, FlowGateway, an_item, gateway, learning


def demoted_before(*, busy_s: float) -> Demoted[Ask]:
    """Return `Demoted` in front of four servers that are busy for this long."""
    fleet, elsewhere = AFleet(4), Elsewhere()
    fleet.busy_until = [busy_s] * 4
    return Demoted(fleet, Queues(FlowSettings(when_late="demote"), elsewhere.by_tenant), elsewhere)


def test_a_request_that_is_too_late_may_be_demoted_instead() -> None:
    gate = gateway(FlowSettings(ttft_s=2.0, when_late="demote"))
    gate.offer(Ask(1900), now=0.0)
    late = gate.offer(Ask(4000), now=0.0)
    in_time = gate.offer(Ask(1000), now=1.0)
    gate.run(now=1.0, until=9.0)
    assert (late.late, in_time.late) == (True, False)
    assert gate.let_go[1:] == [in_time, late]


def test_demoted_requests_are_counted() -> None:
    gate = gateway(FlowSettings(ttft_s=1.5, when_late="demote"))
    gate.offer(SECOND, now=0.0)
    gate.offer(SECOND, now=0.0)
    gate.offer(Ask(100), now=0.0)
    assert gate.flow.demoted == 1


def test_demoted_requests_leave_servers_to_those_in_time() -> None:
    gate = learning(num_servers=4, ttft_s=2.0, when_late="demote")
    for n in range(40):  # half a second of work every quarter of a second keeps two servers busy
        gate.offer(Ask(500), now=0.25 * n)
    for _ in range(8):
        gate.offer(Ask(9000), now=10.0)
    gate.run(now=10.0, until=10.5)
    assert sum(item.payload.tokens == 9000 for item in gate.let_go) == 2
    for n in range(8):
        in_time = gate.offer(Ask(500), now=10.5 + 0.25 * n)
        gate.pump(now=10.5 + 0.25 * n)
        assert not in_time.waits


def test_demoted_requests_leave_half_of_the_servers_to_those_that_could_have_been_in_time() -> None:
    """Short requests keep no server from them."""
    demoted = demoted_before(busy_s=40.0)
    for n in range(40):  # idle servers would serve these in time: they would keep three of four busy
        demoted.could_be_in_time(Forecast(9.0, 10.5, 1.5, 1500), now=0.5 * n)
    for own_s, busy in ((1.9, False), (4.0, False), (4.0, True)):
        demoted.went_late(Forecast(1.0, 1.0 + own_s, own_s, 1), now=20.0)
        assert (demoted.busy_s(0, now=20.0) > 0) is busy


@pytest.mark.parametrize(("own_s", "turn_s"), [(1.0, 9.5), (4.0, 17.0), (20.0, 109.0)])
def test_the_turn_of_a_demoted_request_is_later_the_longer_its_prompt_takes(
    own_s: float, turn_s: float
) -> None:
    """In order of arrival the request would wait nine seconds. Its prompt adds at most five times its own
    time.
    """
    demoted, item = demoted_before(busy_s=10.0), an_item(deadline=2.0)
    demoted.place(item, Forecast(1.0, 1.0 + own_s, own_s, 1), now=0.0)
    assert (item.turn_at, item.last_at) == (turn_s, 1.5 * turn_s)


def test_a_request_that_is_demoted_later_has_its_turn_from_when_it_came() -> None:
    gate = learning(ttft_s=2.0, when_late="demote")
    gate.offer(Ask(100), priority=1, now=0.0)
    gate.fleet.busy_until = [1.5]
    item = gate.offer(Ask(400), now=0.0)
    gate.fleet.busy_until = [10.0]  # other pickers have sent requests to that server
    gate.offer(Ask(400), priority=1, now=0.4)
    gate.pump(now=0.5)
    assert item.late
    assert item.turn_at < 0.5


def test_while_all_would_begin_in_time_in_order_of_arrival_no_server_is_kept_from_demoted_requests() -> None:
    gate = learning(num_servers=4, ttft_s=2.0, when_late="demote")
    gate.offer(Ask(100), priority=1, now=0.0)
    for _ in range(3):
        assert gate.offer(Ask(3000), now=0.0).late
    gate.run(now=0.0, until=0.3)
    assert len(gate.let_go) == 4


def test_of_demoted_requests_the_shortest_goes_first_unless_the_other_has_waited_for_long() -> None:
    gate = learning(ttft_s=2.0, when_late="demote")
    gate.offer(Ask(5000), priority=1, ttft_s=60.0, now=0.0)
    long, short = (gate.offer(Ask(tokens), now=0.0) for tokens in (9000, 3000))
    gate.run(now=0.0, until=20.0)
    assert gate.let_go.index(short) < gate.let_go.index(long)
    gate = learning(ttft_s=2.0, when_late="demote")
    gate.offer(SECOND, priority=1, now=0.0)
    gate.offer(Ask(20_000), now=0.0)
    long = gate.offer(Ask(3000), now=0.0)
    short = gate.offer(Ask(2500), now=12.5)
    gate.run(now=12.5, until=60.0)
    assert gate.let_go.index(long) < gate.let_go.index(short)


def test_a_late_request_is_not_demoted_if_that_would_help_no_other() -> None:
    gate = learning(num_servers=4, ttft_s=2.0, when_late="demote")
    gate.fleet.busy_until = [0.5] * 4
    assert not gate.offer(Ask(9000), now=0.0).waits
    assert gate.flow.demoted == 0


def test_a_late_request_is_not_demoted_where_little_waits_though_servers_were_too_few() -> None:
    gate = learning(num_servers=4, ttft_s=2.0, when_late="demote")
    for _ in range(12):
        gate.offer(SECOND, now=0.0)
    gate.run(now=0.0, until=4.0)
    demoted = gate.flow.demoted
    gate.fleet.busy_until = [4.5] * 4
    assert not gate.offer(Ask(9000), now=4.0).waits
    assert gate.flow.demoted == demoted


@pytest.mark.parametrize("why", ["a higher priority may come", "servers are too few"])
def test_a_late_request_is_demoted_if_others_gain(why: str) -> None:
    gate = learning(num_servers=4, ttft_s=2.0, when_late="demote")
    if why == "servers are too few":
        for _ in range(12):
            gate.offer(SECOND, now=0.0)
    else:
        gate.offer(Ask(100), priority=1, now=0.0)
    gate.fleet.busy_until = [0.5] * 4
    assert gate.offer(Ask(9000), now=0.0).late


def test_a_demoted_request_goes_when_its_turn_comes() -> None:
    gate = learning(ttft_s=2.0, when_late="demote")
    gate.offer(SECOND, now=0.0)
    gate.offer(Ask(3000), now=0.0)
    late = gate.offer(Ask(3000), now=0.0)
    assert late.late
    now = 0.0
    while late.waits:  # the server always has work
        now += 0.25
        gate.offer(Ask(300), now=now)
        gate.run(now=now, until=now + 0.2)
        assert now < 60
    assert now == pytest.approx(late.turn_at, abs=0.5)


def test_a_demoted_request_does_not_go_before_a_higher_priority() -> None:
    gate = learning(ttft_s=2.0, when_late="demote")
    gate.offer(SECOND, priority=1, now=0.0)
    gate.offer(Ask(30_000), priority=1, ttft_s=100.0, now=0.0)
    late = gate.offer(Ask(3000), now=0.0)
    high = gate.offer(SECOND, priority=1, now=0.0, ttft_s=1000.0)
    gate.run(now=0.0, until=60.0)
    assert gate.let_go.index(high) < gate.let_go.index(late)


def test_requests_of_lower_priorities_do_not_delay_the_turn_of_a_demoted_request() -> None:
    """Sixty seconds of work of a lower priority wait."""
    gate = learning(num_servers=2, ttft_s=2.0, when_late="demote")
    gate.fleet.busy_until = [3.0, 3.0]
    gate.offer(SECOND, priority=1, now=0.0)
    lower = [gate.offer(Ask(6000), now=0.0) for _ in range(20)]
    high = gate.offer(SECOND, priority=1, now=0.0)
    assert all(item.waits for item in lower)
    assert high.late
    assert high.turn_at < 5.0


def test_demoted_requests_whose_turn_has_come_ask_once_whether_a_server_is_free_for_them() -> None:
    class Counting(AFleet):
        looks = 0

        def pool(self, *, now: float) -> Pool:
            self.looks += 1
            return AFleet.pool(self, now=now)

    fleet = Counting(1)
    gate = FlowGateway(
        FlowControl(FlowSettings(headroom_s=None, ttft_s=1.0, when_late="demote"), fleet), fleet
    )
    fleet.busy_until = [1e4]
    items = [gate.offer(Ask(9000), now=0.0) for _ in range(300)]
    now = items[-1].turn_at
    gate.pump(now=now)
    overdue = [each for each in items if each.waits and each.turn_at <= now + 1.0 < each.last_at]
    assert len(overdue) > 50
    fleet.looks = 0
    gate.pump(now=now + 1.0)
    assert 1 <= fleet.looks <= 10
