"""The preferences of the least-cost rule, and the parts of its price. `test_rules` has the other rules."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from epp.base.types import EndpointName
from epp.picker.scheduling.candidates import ShownCandidates
from epp.picker.scheduling.least_cost import Demand, LeastCost
from epp.picker.scheduling.schedule import MOST
from epp.picker.scheduling.snapshot import SentPick
from tests.invariants.picker import check_demand
from tests.unit.picker.scheduling.orders import SPEC, order, rule_of
from tests.unit.picker.scheduling.snapshots import SeenEndpoint, weighed


def first(seen: list[SeenEndpoint], *, seed: int, unreported_picks: float, adapter: str = "") -> int:
    """Return the place that `least-cost` takes if other pickers have sent `unreported_picks` requests that
    this picker does not know yet.
    """
    ranked = rule_of("least-cost", seed=seed).rank(
        weighed(seen, adapter=adapter, unreported_picks=unreported_picks)
    )
    assert sorted(set(ranked.places)) == sorted(ranked.places)
    assert len(ranked.places) == min(len(seen), MOST)
    return ranked.places[0]


def with_arrivals(count: int) -> LeastCost:
    """Return a rule that has just sent so many requests, within two seconds."""
    rule = LeastCost(SPEC, random.Random(0))
    for _ in range(count):
        rule.committed(SentPick(EndpointName("a"), -2.0))
    return rule


def test_the_cost_is_backlog_and_own_work_with_its_stall_price() -> None:
    one = SeenEndpoint("a", cached=400, backlog=500.0, in_flight=2, rate=2000.0, free_slot=True)
    choice = with_arrivals(6).rank(weighed([one], adapter="x"))
    late = 1 + 700 / 65_536  # the uncached tokens stand at 700 in the mean
    assert choice.score_s == pytest.approx([0.25 + (0.3 * late + 0.5) * (1 + 0.15 * 2 + 3 * 0.25)])
    parts = {"backlog": 0.25, "prefill": 0.3 * late, "stall": (0.3 * late + 0.5) * 1.05, "lora": 0.5}
    for shown in (choice, replace(choice, score_s=None)):
        (candidate,) = ShownCandidates(shown, SPEC, best_cached_tokens=400)
        assert candidate.parts_s == pytest.approx(parts | {"failing": 0.0})


@given(
    one=st.builds(
        SeenEndpoint,
        st.just("a"),
        cached=st.integers(0, 1000),
        backlog=st.floats(0, 1e6),
        in_flight=st.integers(0, 100),
        rate=st.floats(1, 1e5),
        has_adapter=st.booleans(),
        free_slot=st.booleans(),
    ),
    arrivals=st.integers(0, 100),
    adapter=st.sampled_from(["", "x"]),
)
def test_the_shown_parts_sum_to_the_score(*, one: SeenEndpoint, arrivals: int, adapter: str) -> None:
    choice = with_arrivals(arrivals).rank(weighed([one], adapter=adapter))
    for shown in (choice, replace(choice, score_s=None)):
        (candidate,) = ShownCandidates(shown, SPEC, best_cached_tokens=one.cached)
        assert choice.score_s == pytest.approx([sum(candidate.parts_s.values())])


def test_a_long_prefill_avoids_a_queue_that_others_will_join() -> None:
    seen = [SeenEndpoint("queue", 1000, backlog=1000.0), SeenEndpoint("idle")]
    # 1 + 2 x (1 + 2 / 65.536) (1 + 0.5 a) against 3 (1 + 1.5 / 65.536) = 3.07
    assert order(with_arrivals(0), seen, prompt=3000)[0] == "queue"
    assert order(with_arrivals(1), seen, prompt=3000)[0] == "idle"
    # Few join a long queue: 9 + 2 x (1 + 11 / 65.536) (1 + 0.5 a) against 12 (1 + 6 / 65.536) = 13.1
    seen = [SeenEndpoint("queue", 10_000, backlog=9000.0), SeenEndpoint("idle")]
    assert order(with_arrivals(5), seen, prompt=12_000)[0] == "queue"
    assert order(with_arrivals(7), seen, prompt=12_000)[0] == "idle"


def test_long_prompts_avoid_servers_whose_answers_they_would_stall() -> None:
    rule = rule_of("least-cost")
    seen = [SeenEndpoint("waits", backlog=3000.0), SeenEndpoint("writes", in_flight=10)]
    assert order(rule, seen, prompt=8000)[0] == "waits"
    assert order(rule, seen, prompt=100)[0] == "writes"


def test_a_popular_prefix_gets_a_copy_once_its_holder_writes_many_answers() -> None:
    def first(in_flight: int) -> str:
        holder = SeenEndpoint("holder", cached=8000, in_flight=in_flight)
        return order(rule_of("least-cost"), [holder, SeenEndpoint("other")], prompt=9000)[0]

    # 1000 (1 + 8500 / 65,536) (1 + 0.15 L) against 9000 (1 + 4500 / 65,536)
    assert first(50) == "holder"
    assert first(51) == "other"


def one_in(others: int, *ago_s: float) -> LeastCost:
    """Return a rule that knows earlier requests. One in `others` of them was for the prefix 1."""
    rule = LeastCost(SPEC, random.Random(0))
    for ago in ago_s:
        for n in range(others):
            rule.committed(SentPick(EndpointName("holder"), 100.0 - ago, prefix=min(2, n + 1)))
    return rule


def test_a_copy_has_a_lower_price_if_its_holder_is_busy() -> None:
    def first(rule: LeastCost, *, backlog: float = 9000.0) -> str:
        idle = [SeenEndpoint(f"idle{n}", backlog=99_000.0) for n in range(2)]
        seen = [SeenEndpoint("holder", 8000, backlog, 40), SeenEndpoint("other", in_flight=10), *idle]
        return order(rule, seen, prompt=9000, prefix=1, at=100.0)[0]

    # Holder: 9 s + 1 s (1 + 0.15 x 40) = 16 s. Other: 1 s x 2.5 + 8 s x 2.5 / (1 + (n - N / 4) / 2)
    assert first(one_in(1)) == "holder", "22.5 s elsewhere"
    assert first(one_in(1, 4.0)) == "holder", "17.0 s elsewhere: 0.75 of 1 are too many for one of four"
    assert first(one_in(1, 6.0, 5.0, 4.0, 3.0)) == "other", "10.5 s elsewhere"
    assert first(one_in(4, *[5.0] * 30)) == "holder", "one in four is the part of one server"
    assert first(one_in(1, *[9.1] * 30)) == "holder", "the earlier requests came before such a wait"
    assert first(one_in(1, *[n / 1000 for n in range(40, 5, -1)])) == "holder", "one client sent them"
    assert first(one_in(1, 6.0, 5.0, 4.0, 3.0), backlog=3000.0) == "holder", "10 s there"


def test_stall_price_of_an_adapter_load_stays_even_if_prefix_is_popular() -> None:
    def score_s(rule: LeastCost) -> float:
        holder = SeenEndpoint("holder", 800, 9000.0, has_adapter=True)
        seen = [holder, SeenEndpoint("other", in_flight=10, free_slot=True)]
        ranked = rule.rank(weighed(seen, adapter="sql", prefix=1, at=100.0))
        assert ranked.score_s is not None
        return float(ranked.score_s[1])

    price = 1 + 0.15 * 10
    assert score_s(one_in(1)) == pytest.approx((1 + 500 / 65_536 + 0.5) * price)
    paid = 0.2 + 0.8 / 2
    assert score_s(one_in(1, *[5.0] * 4)) == pytest.approx((paid * (1 + 700 / 65_536) + 0.5) * price)


def test_picks_without_the_prefix_spread_if_many_are_unreported() -> None:
    seen = [SeenEndpoint(f"s{n}", in_flight=n) for n in range(100)]
    known = Counter(first(seen, seed=seed, unreported_picks=2.0) for seed in range(300))
    assert known == {0: 300}
    unreported = Counter(first(seen, seed=seed, unreported_picks=80.0) for seed in range(300))
    assert unreported[0] < 30, "one of about forty pickers looks at the best server"
    assert sum(place * times for place, times in unreported.items()) / 300 < 35, (
        "the better of a few, not any"
    )


def test_holders_share_their_requests_if_many_picks_are_unreported() -> None:
    others = [SeenEndpoint(f"s{n}") for n in range(99)]
    one = [*others, SeenEndpoint("h", cached=900, in_flight=1)]
    assert {first(one, seed=seed, unreported_picks=500.0) for seed in range(50)} == {99}
    ten = [*others, *(SeenEndpoint(f"h{n}", cached=900, in_flight=n) for n in range(10))]
    taken = Counter(first(ten, seed=seed, unreported_picks=500.0) for seed in range(300))
    assert set(taken) <= set(range(99, 109))
    assert taken[99] < 120, "a pick looks at two of the ten"


def test_holder_is_compared_with_usual_server_if_many_picks_are_unreported() -> None:
    """All pickers see the same idle server, and each of them would make one more copy of the prefix there."""
    seen = [
        SeenEndpoint("h", cached=900, backlog=8000),
        SeenEndpoint("idle"),
        *(SeenEndpoint(f"s{n}", backlog=12_000) for n in range(98)),
    ]
    assert first(seen, seed=1, unreported_picks=0.0) == 1
    taken = Counter(first(seen, seed=seed, unreported_picks=500.0) for seed in range(300))
    assert taken[0] > 270


def test_servers_without_the_adapter_do_not_come_before_server_that_has_it() -> None:
    seen = [*(SeenEndpoint(f"s{n}") for n in range(50)), SeenEndpoint("a", has_adapter=True, in_flight=1)]
    assert {first(seen, seed=seed, adapter="x", unreported_picks=500.0) for seed in range(50)} == {50}


def test_servers_with_queues_beyond_all_unreported_requests_are_not_drawn() -> None:
    seen = [
        SeenEndpoint("a"),
        SeenEndpoint("b"),
        SeenEndpoint("c", backlog=3e6),
        SeenEndpoint("d", backlog=3e6),
    ]
    taken = Counter(first(seen, seed=seed, unreported_picks=20.0) for seed in range(100))
    assert set(taken) == {0, 1}


def came(demand: Demand, prefix: int, *, now: float, most_s: float = 99.0) -> object:
    return demand.between(prefix, now - most_s, now + 0.5) if prefix in demand else None


def test_requests_for_a_prefix_and_all_since_are_counted() -> None:
    demand = Demand()
    assert came(demand, 7, now=1.0) is None
    demand.asked(7, now=1.0)
    demand.asked(8, now=2.0)
    demand.asked(0, now=3.0)
    demand.asked(7, now=4.0)
    assert came(demand, 7, now=4.0) == (2, 4)
    assert demand.per_s(now=22.0) == 3 / 20, "the first one was too long ago"
    assert came(demand, 7, now=4.0, most_s=2.0) == (1, 1)
    assert came(demand, 7, now=5.0, most_s=0.5) == (0, 0)
    assert came(demand, 8, now=4.0) == (1, 3)
    assert came(demand, 0, now=4.0) is None, "no server held a part of the prompt"


def test_only_last_prefixes_and_requests_that_were_served_are_remembered() -> None:
    demand = Demand()

    def serve(prefix: int, *, now: float) -> None:
        demand.asked(prefix, now=now)
        demand.ended(prefix, at=now, computed=True)

    for n in range(40):
        serve(1, now=float(n))
    assert came(demand, 1, now=40.0) == (32, 32)
    for prefix in range(2, 4097):
        serve(prefix, now=50.0)
    serve(1, now=60.0)
    serve(5000, now=60.0)
    check_demand(demand)
    assert came(demand, 2, now=60.0) is None, "used least recently"
    assert came(demand, 1, now=60.0, most_s=1.0) == (1, 2)
    assert came(demand, 3, now=60.0) is not None


def test_requests_that_no_server_computed_leave_no_trace_in_the_demand() -> None:
    asked, never = Demand(), Demand()
    for n in range(32):
        for demand in (asked, never):
            demand.asked(1, now=float(n))
            demand.ended(1, at=float(n), computed=True)
    for n in range(5000):
        asked.asked(n, now=40.0 + n)
    assert came(asked, 1, now=5040.0, most_s=5039.0) == (32, 5031)
    for n in range(5000):
        asked.ended(n, at=40.0 + n, computed=False)
    check_demand(asked)
    for most_s in (5041.0, 5019.0):
        figures = [came(each, 1, now=5040.0, most_s=most_s) for each in (asked, never)]
        assert figures[0] == figures[1] != (0, 0)
    assert asked.per_s(now=50.0) == never.per_s(now=50.0) > 0
