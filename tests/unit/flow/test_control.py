"""Which request goes first, which is refused, and what people see of the decisions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from weakref import ref

import pytest

from epp.flow.control import FlowControl
from epp.flow.queues import OTHERS
from epp.flow.settings import Bound, FlowSettings
from epp.flow.shares import OTHERS_LABEL, Shares
from tests.unit.flow.a_fleet import AFleet, Ask, Gateway

SECOND = Ask(1000)
"""A prompt that keeps a server busy for a second."""


class Prompt(Ask):
    """A prompt that a weak reference can name."""


def gateway(settings: FlowSettings | None = None, *, num_servers: int = 1) -> Gateway:
    fleet = AFleet(num_servers)
    return Gateway(FlowControl(settings or FlowSettings(), fleet), fleet)


def reasons(gate: Gateway) -> list[str]:
    return [refused.reason for refused in gate.refused]


class TestGoing:
    def test_a_request_for_an_idle_server_goes_at_once(self) -> None:
        gate = gateway()
        item = gate.offer(SECOND, now=0.0)
        assert gate.let_go == [item]
        assert gate.flow.due_at == inf

    def test_a_request_for_a_busy_fleet_waits_until_the_headroom(self) -> None:
        gate = gateway(FlowSettings(headroom_s=0.25))
        gate.offer(SECOND, now=0.0)
        second = gate.offer(SECOND, now=0.0)
        assert gate.pump(now=0.0) == 0
        assert gate.flow.due_at == pytest.approx(0.75)
        gate.run(now=0.0, until=0.8)
        assert gate.let_go[-1] is second

    def test_a_request_whose_prompt_is_under_way_goes_after_it_unless_somebody_waits_before(self) -> None:
        gate = gateway(FlowSettings(nearly_cached_s=0.05), num_servers=1)
        gate.offer(SECOND, now=0.0)
        rides = gate.offer(Ask(400, home=0), now=0.0)
        assert gate.let_go[1:] == [rides]
        gate.offer(SECOND, now=0.0)
        gate.offer(Ask(400, home=0), now=0.0)
        gate.pump(now=0.0)
        assert gate.let_go[1:] == [rides]

    def test_a_request_that_rides_is_held_too_where_its_server_is_busy_for_longer_than_the_goal(self) -> None:
        gate = gateway(FlowSettings(nearly_cached_s=0.05, goal_s=0.5))
        gate.offer(SECOND, now=0.0)
        rides = gate.offer(Ask(400, home=0), now=0.0)
        assert rides.waits
        assert gate.run(now=0.0, until=0.6) == 0.6
        assert gate.let_go[1:] == [rides]

    def test_nobody_overtakes_those_who_wait_although_a_server_is_free_by_now(self) -> None:
        gate = gateway()
        gate.offer(SECOND, now=0.0)
        first, second = gate.offer(SECOND, now=0.1), gate.offer(Ask(1), now=1.0)
        gate.pump(now=1.0)
        assert gate.let_go[1:] == [first]
        gate.run(now=1.0, until=2.0)
        assert gate.let_go[1:] == [first, second]

    def test_the_higher_priority_goes_first(self) -> None:
        gate = gateway()
        gate.offer(SECOND, now=0.0)
        batch = gate.offer(SECOND, priority=0, now=0.1)
        person = gate.offer(SECOND, priority=10, now=0.2)
        gate.run(now=0.2, until=3.0)
        assert gate.let_go[1:] == [person, batch]

    def test_a_request_waits_for_its_prefix_while_the_next_one_takes_the_idle_server(self) -> None:
        gate = gateway(num_servers=2)
        gate.offer(Ask(5000, home=0), now=0.0)  # half a second at server 0, which holds its prompt
        gate.fleet.busy_until[1] = 0.2
        at_home, anywhere = gate.offer(Ask(9000, home=0), now=0.0), gate.offer(Ask(100), now=0.0)
        gate.run(now=0.0, until=0.3)
        assert gate.let_go[1:] == [anywhere]
        gate.run(now=0.3, until=0.5)
        assert gate.let_go[1:] == [anywhere, at_home]

    def test_with_order_shortest_a_long_prompt_is_overtaken_only_for_its_patience(self) -> None:
        gate = gateway(FlowSettings(order="shortest", patience=2.0))
        gate.offer(SECOND, now=0.0)
        long = gate.offer(Ask(2000), now=0.0)
        soon, late = gate.offer(Ask(500), now=0.5), gate.offer(Ask(500), now=3.5)
        gate.run(now=3.5, until=9.0)
        assert gate.let_go[1:] == [soon, long, late]

    def test_with_order_deadline_the_first_deadline_goes_first(self) -> None:
        gate = gateway(FlowSettings(order="deadline"))
        gate.offer(SECOND, now=0.0)
        patient, pressed = (gate.offer(Ask(100), ttft_s=ttft_s, now=0.0) for ttft_s in (9.0, 5.0))
        gate.run(now=0.0, until=2.0)
        assert gate.let_go[1:] == [pressed, patient]

    def test_a_draining_gateway_lets_all_go_in_order_and_holds_nobody(self) -> None:
        gate = gateway(FlowSettings(ttft_s=3.0))
        gate.offer(SECOND, now=0.0)
        first, second = gate.offer(SECOND, now=0.0), gate.offer(SECOND, now=0.0)
        gate.flow.drain()
        newcomer = gate.offer(SECOND, now=0.0)
        gate.pump(now=0.0)
        assert gate.let_go[1:] == [newcomer, first, second]


class TestFairness:
    def test_tenants_share_tokens_whatever_the_size_of_their_requests(self) -> None:
        gate = gateway()
        for _ in range(40):
            gate.offer(Ask(1000), tenant="few and long", now=0.0)
        for _ in range(400):
            gate.offer(Ask(100), tenant="many and short", now=0.0)
        gate.run(now=0.0, until=20.0)
        had: Counter[str] = Counter()
        for item in gate.let_go:
            had[item.tenant] += item.payload.tokens
        assert abs(had["few and long"] - had["many and short"]) <= 2000

    def test_who_comes_back_has_saved_nothing_up(self) -> None:
        gate = gateway()
        gate.offer(Ask(100), tenant="back", now=0.0)
        for n in range(1, 20):
            gate.offer(Ask(100), tenant="busy", now=0.1 * n)
            gate.run(now=0.1 * n, until=0.1 * n)
        for _ in range(20):
            gate.offer(Ask(100), tenant="back", now=2.0)
            gate.offer(Ask(100), tenant="busy", now=2.0)
        gate.run(now=2.0, until=3.0)
        late = Counter(item.tenant for item in gate.let_go[20:])
        assert late["busy"] >= 4, late

    def test_tenants_beyond_the_limit_share_one_queue(self) -> None:
        gate = gateway(FlowSettings(max_tenants=2))
        for name in ("a", "b", "c", "d"):
            gate.offer(SECOND, tenant=name, now=0.0)
        waiting = [gate.offer(SECOND, tenant=name, now=0.0).tenant for name in ("a", "c", "e", "\0x")]
        assert waiting == ["a", OTHERS, OTHERS, OTHERS]
        gate.flow.check_integrity()

    def test_a_tenant_who_owes_nothing_any_more_makes_room(self) -> None:
        gate = gateway(FlowSettings(max_tenants=2))
        gate.offer(Ask(10), tenant="a", now=0.0)
        for n in range(3):
            gate.offer(Ask(1000), tenant="b", now=float(n))
            gate.run(now=float(n), until=float(n))
        assert gate.offer(Ask(10), tenant="c", now=9.0).tenant == "c"

    def test_priorities_beyond_the_limit_count_as_the_next_lower_one(self) -> None:
        gate = gateway(FlowSettings(max_priorities=2))
        kept = [gate.offer(SECOND, priority=p, now=0.0).priority for p in (0, 0, 10, 5, 11, -1)]
        assert kept == [0, 0, 10, 0, 10, 0]


class TestRefusing:
    def test_a_request_that_cannot_be_in_time_is_refused_at_once(self) -> None:
        gate = gateway(FlowSettings(ttft_s=2.0))
        gate.offer(Ask(1500), now=0.0)
        gate.offer(Ask(1000), now=0.0)
        assert reasons(gate) == ["deadline"]
        assert len(gate.flow) == 0

    def test_a_request_that_becomes_late_while_it_waits_is_refused_when_that_is_certain(self) -> None:
        gate = gateway(FlowSettings(ttft_s=2.0))
        gate.offer(SECOND, now=0.0)
        gate.offer(Ask(900), now=0.0)
        gate.offer(Ask(900), now=0.0)  # after the one before it: 0.9 + 0.9 + 0.9 seconds
        gate.run(now=0.0, until=0.8)
        assert reasons(gate) == []
        gate.run(now=0.8, until=1.1)  # the latest moment at which it may start on an idle server
        assert reasons(gate) == ["deadline"]

    def test_a_request_that_is_too_late_may_be_demoted_instead(self) -> None:
        gate = gateway(FlowSettings(ttft_s=2.0, when_late="demote"))
        gate.offer(Ask(1900), now=0.0)
        late = gate.offer(Ask(4000), now=0.0)
        in_time = gate.offer(Ask(1000), now=1.0)
        gate.run(now=1.0, until=9.0)
        assert (late.late, in_time.late) == (True, False)
        assert gate.let_go[1:] == [in_time, late]

    def test_its_own_deadline_counts_before_the_policys(self) -> None:
        gate = gateway(FlowSettings(ttft_s=0.5))
        gate.offer(SECOND, ttft_s=5.0, now=0.0)
        assert reasons(gate) == []

    def test_a_request_that_has_waited_for_its_ttl_is_refused(self) -> None:
        gate = gateway(FlowSettings(ttl_s=9.0, ttl_by_priority_s={7: 0.5}))
        gate.offer(Ask(3000), now=0.0)
        gate.offer(Ask(10), priority=7, now=0.0)
        gate.offer(Ask(10), priority=1, now=0.0)
        gate.run(now=0.0, until=1.0)
        assert reasons(gate) == ["ttl"]
        assert gate.refused[0].item.priority == 7

    @pytest.mark.parametrize(
        "settings",
        [
            FlowSettings(in_all=Bound(requests=2)),
            FlowSettings(per_priority=Bound(requests=2)),
            FlowSettings(per_tenant=Bound(requests=2)),
            FlowSettings(in_all=Bound(size_bytes=25)),
        ],
        ids=["in all", "of a priority", "of a tenant", "in bytes"],
    )
    def test_at_a_bound_the_newcomer_is_refused_where_nobody_is_worth_less(
        self, settings: FlowSettings
    ) -> None:
        gate = gateway(settings)
        gate.offer(SECOND, now=0.0)
        waiting = [gate.offer(SECOND, size_bytes=10, now=0.0) for _ in range(3)]
        assert reasons(gate) == ["full"]
        assert gate.refused[0].item is waiting[2]

    def test_at_a_bound_the_lowest_priority_is_shed_first_and_then_who_is_furthest_over_its_share(
        self,
    ) -> None:
        gate = gateway(FlowSettings(in_all=Bound(requests=4)))
        gate.offer(SECOND, now=0.0)
        low = gate.offer(SECOND, priority=-1, tenant="light", now=0.0)
        greedy = [gate.offer(SECOND, tenant="greedy", now=0.0) for _ in range(3)]
        gate.offer(SECOND, tenant="light", now=0.0)
        gate.offer(SECOND, tenant="light", now=0.0)
        gate.pump(now=0.0)
        assert [refused.item for refused in gate.refused] == [low, greedy[2]]

    def test_nobody_is_shed_for_a_newcomer_that_is_refused_in_the_end(self) -> None:
        gate = gateway(FlowSettings(in_all=Bound(size_bytes=100)))
        gate.offer(SECOND, now=0.0)
        for priority in (0, 2):
            gate.offer(SECOND, priority=priority, size_bytes=50, now=0.0)
        large = gate.offer(SECOND, priority=1, size_bytes=90, now=0.0)
        gate.pump(now=0.0)
        assert [refused.item for refused in gate.refused] == [large]
        assert len(gate.flow) == 2
        gate.flow.check_integrity()

    def test_a_smaller_bound_sheds_what_is_over_it(self) -> None:
        gate = gateway()
        gate.offer(SECOND, now=0.0)
        waiting = [gate.offer(SECOND, priority=n, now=0.0) for n in (3, 1, 2)]
        gate.flow.apply(FlowSettings(in_all=Bound(requests=1)), now=0.0)
        gate.pump(now=0.0)
        assert [refused.item for refused in gate.refused] == [waiting[1], waiting[2]]

    def test_a_client_that_leaves_frees_its_place(self) -> None:
        gate = gateway(FlowSettings(in_all=Bound(requests=1)))
        gate.offer(SECOND, now=0.0)
        first = gate.offer(SECOND, now=0.0)
        gate.flow.leave(first)
        gate.flow.leave(first)
        gate.offer(SECOND, now=0.0)
        assert reasons(gate) == []
        gate.run(now=0.0, until=5.0)
        assert first not in gate.let_go

    @pytest.mark.parametrize("how", ["leaves", "is pushed out", "goes", "is late"])
    def test_nothing_keeps_the_prompt_of_a_request_that_waits_no_more(self, how: str) -> None:
        gate = gateway(FlowSettings(per_tenant=Bound(requests=1), ttl_s=60.0))
        gate.offer(SECOND, now=0.0)
        gate.offer(SECOND, priority=5, now=0.0)
        gate.offer(SECOND, priority=-5, now=0.0)  # waits all the time
        payload = Prompt(1000)
        item = gate.offer(payload, ttft_s=2.5 if how == "is late" else None, now=0.0)
        kept = ref(payload)
        if how == "leaves":
            gate.flow.leave(item)
        elif how == "is pushed out":
            gate.flow.apply(FlowSettings(per_tenant=Bound(requests=0), ttl_s=60.0), now=0.0)
            gate.pump(now=0.0)
        else:
            gate.run(now=0.0, until=2.5)
        gate.let_go.clear()
        gate.refused.clear()
        del payload, item
        assert kept() is None


class TestFigures:
    def test_retry_after_is_the_time_in_which_the_queue_drains(self) -> None:
        gate = gateway(FlowSettings(in_all=Bound(requests=10)))
        for n in range(30):  # a thousand tokens a second
            gate.offer(Ask(500), now=0.5 * n)
            gate.run(now=0.5 * n, until=0.5 * n)
        for _ in range(12):
            gate.offer(Ask(500), now=15.0)
        waited_s = 10 * 500 / 1000
        assert gate.refused[-1].retry_after_s == pytest.approx(waited_s, rel=0.3)

    def test_saturation_is_0_idle_and_over_1_where_too_much_comes(self) -> None:
        gate = gateway(FlowSettings(ttft_s=2.0))
        assert gate.flow.saturation(now=0.0) == 0.0
        for n in range(100):  # twice as much as the server can do
            gate.offer(Ask(500), now=0.25 * n)
            gate.run(now=0.25 * n, until=0.25 * n)
        assert 1.5 < gate.flow.saturation(now=25.0) < 2.5

    def test_saturation_is_0_again_once_nothing_comes_any_more(self) -> None:
        gate = gateway(FlowSettings(ttft_s=2.0))
        for _ in range(10):
            gate.offer(SECOND, now=0.0)
        gate.run(now=0.0, until=15.0)
        assert len(gate.refused) > 5
        assert gate.flow.saturation(now=15.0) == 0.0

    def test_saturation_is_under_1_where_the_fleet_keeps_up(self) -> None:
        gate = gateway(FlowSettings(ttft_s=2.0))
        for n in range(100):
            gate.offer(Ask(500), now=n + 0.0)
            gate.run(now=n + 0.0, until=n + 0.0)
        assert 0 < gate.flow.saturation(now=99.1) < 0.5

    def test_what_waits_is_told_by_priority(self) -> None:
        gate = gateway()
        gate.offer(SECOND, now=0.0)
        for priority, size in ((0, 10), (0, 20), (5, 30)):
            gate.offer(SECOND, priority=priority, size_bytes=size, now=0.5)
        told = gate.flow.waiting()
        assert {p: (w.requests, w.size_bytes, w.tokens) for p, w in told.items()} == {
            0: (2, 30, 2000),
            5: (1, 30, 1000),
        }
        assert gate.flow.oldest_s(now=0.75) == 0.25

    def test_a_fleet_without_room_costs_no_forecasts(self) -> None:
        gate = gateway()
        gate.offer(Ask(10_000), now=0.0)
        for _ in range(200):
            gate.offer(SECOND, now=0.0)
        asked = gate.fleet.asked
        for n in range(100):
            gate.pump(now=0.01 * n)
        assert gate.fleet.asked == asked

    def test_one_request_is_found_with_a_bounded_number_of_forecasts(self) -> None:
        gate = gateway(FlowSettings(forecasts_per_tenant=3, max_forecasts=5), num_servers=2)
        gate.fleet.busy_until[0] = 1.0
        for n in range(50):  # all wait for server 0, while server 1 is free
            gate.offer(Ask(100_000, home=0), tenant=str(n % 5), now=0.0)
        asked = gate.fleet.asked
        assert gate.pump(now=0.0) == 0
        assert gate.fleet.asked - asked <= 5 + 3

    def test_of_settings_that_make_no_sense_the_field_is_named(self) -> None:
        for wrong in ({"headroom_s": -1.0}, {"ttft_s": 0.0}, {"max_forecasts": 0}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                replace(FlowSettings(), **wrong)


def test_what_tenants_have_had_is_told_by_name_of_the_first_ones() -> None:
    shares = Shares()
    for n in range(100):
        shares.add(0, f"t{n}", 10, late=False)
    shares.add(0, "t0", 5, late=False)
    assert len(shares.tokens) == 33
    assert (shares.tokens["t0"], shares.tokens[OTHERS_LABEL]) == (15, 680)


def test_demoted_requests_are_counted() -> None:
    gate = gateway(FlowSettings(ttft_s=1.5, when_late="demote"))
    gate.offer(SECOND, now=0.0)
    gate.offer(SECOND, now=0.0)
    gate.offer(Ask(100), now=0.0)
    assert gate.flow.demoted == 1


def test_a_request_that_goes_at_once_is_let_go_by_offer_itself() -> None:
    fleet = AFleet(1)
    gate = Gateway(FlowControl(FlowSettings(), fleet), fleet)
    item = gate.offer(SECOND, now=0.0)
    assert gate.let_go == [item]
