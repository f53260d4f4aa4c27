"""Every rule: what it prefers, that it orders all candidates, and that equals are chosen by chance."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.policy import Cost, Lora, PolicySpec, RuleName
from epp.scheduling.candidates import View
from epp.scheduling.rules import RULES, Rule, cost_parts_s
from epp.types import Address, EndpointName

SPEC = PolicySpec(
    cost=Cost(uncached_token_weight=1.0, stalled_request_weight=0.15, running_request_tokens=50.0),
    lora=Lora(load_seconds=0.5),
)


def view(
    name: str,
    *,
    matched: int = 0,
    prompt: int = 1000,
    backlog: float = 0.0,
    in_flight: int = 0,
    rate: float = 1000.0,
    has_adapter: bool = False,
    free_slot: bool = False,
) -> View:
    return View(
        name=EndpointName(name),
        address=Address("10.0.0.1", 8000),
        cached_tokens=matched,
        matched_tokens=matched,
        uncached_tokens=prompt - matched,
        backlog_tokens=backlog,
        in_flight=in_flight,
        waiting=0,
        kv_usage=0.0,
        rate=rate,
        has_adapter=has_adapter,
        free_slot=free_slot,
    )


def rule_of(name: RuleName, *, seed: int = 0) -> Rule:
    return RULES[name](SPEC, random.Random(seed))


def order(rule: Rule, views: list[View], *, session: str = "", adapter: str = "") -> list[str]:
    return [v.name for v in rule.rank(views, session=session, adapter=adapter)[0]]


def firsts(rule: Rule, views: list[View], *, times: int = 400) -> Counter[str]:
    return Counter(order(rule, views)[0] for _ in range(times))


ALL: list[RuleName] = list(get_args(RuleName))


def test_every_name_that_a_policy_may_say_has_a_rule() -> None:
    assert set(RULES) == set(ALL)


@pytest.mark.parametrize("name", ALL)
@given(
    data=st.data(),
    count=st.integers(1, 12),
    session=st.sampled_from(["", "s1", "s2"]),
    adapter=st.sampled_from(["", "x"]),
)
def test_the_order_is_a_permutation_of_the_candidates(
    name: RuleName, data: st.DataObject, count: int, session: str, adapter: str
) -> None:
    views = [
        view(
            f"e{i}",
            matched=data.draw(st.integers(0, 1000)),
            backlog=data.draw(st.floats(0, 1e6)),
            in_flight=data.draw(st.integers(0, 50)),
            has_adapter=data.draw(st.booleans()),
        )
        for i in range(count)
    ]
    given_order = list(views)
    ordered, reason = rule_of(name).rank(views, session=session, adapter=adapter)
    assert sorted(map(id, ordered)) == sorted(map(id, views))
    assert views == given_order  # the caller's list is left alone
    assert reason


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("round-robin", "session")])
def test_equals_are_chosen_by_chance_not_by_their_place_in_the_list(name: RuleName) -> None:
    counts = firsts(rule_of(name), [view(n) for n in "abcd"])
    assert set(counts) == set("abcd")
    assert max(counts.values()) < 160  # 100 each on average


@pytest.mark.parametrize("name", ["least-cost", "affinity", "least-load"])
def test_the_fallback_among_equals_is_chosen_by_chance_too(name: RuleName) -> None:
    """A fixed second would get everything that a dead first leaves."""
    rule, views = rule_of(name), [view("a", matched=900), *(view(n, in_flight=1) for n in "bcd")]
    if name == "least-load":
        views[0].in_flight = 0
    orders = [order(rule, views) for _ in range(100)]
    assert {o[0] for o in orders} == {"a"}
    assert {o[1] for o in orders} == set("bcd")


# -- least-cost --------------------------------------------------------------------------------------------------


def test_cost_is_backlog_and_own_work_priced_by_whom_it_stalls_and_requests_in_flight() -> None:
    one = view("a", matched=400, backlog=500.0, in_flight=2, rate=2000.0, free_slot=True)
    ordered, _ = rule_of("least-cost").rank([one], session="", adapter="x")
    # (500 + 50 x 2) / 2000 + (600 / 2000 + 0.5) x (1 + 0.15 x 2)
    assert ordered[0].score_s == pytest.approx(1.34)
    parts = cost_parts_s(one, spec=SPEC, adapter="x")
    assert parts == pytest.approx(
        {"backlog": 0.25, "prefill": 0.3, "stall": 0.24, "in_flight": 0.05, "lora": 0.5}
    )


@given(
    matched=st.integers(0, 1000),
    backlog=st.floats(0, 1e6),
    in_flight=st.integers(0, 100),
    rate=st.floats(1, 1e5),
    has_adapter=st.booleans(),
    free_slot=st.booleans(),
    adapter=st.sampled_from(["", "x"]),
)
def test_the_shown_parts_sum_to_the_score(
    *,
    matched: int,
    backlog: float,
    in_flight: int,
    rate: float,
    has_adapter: bool,
    free_slot: bool,
    adapter: str,
) -> None:
    one = view(
        "a",
        matched=matched,
        backlog=backlog,
        in_flight=in_flight,
        rate=rate,
        has_adapter=has_adapter,
        free_slot=free_slot,
    )
    rule_of("least-cost").rank([one], session="", adapter=adapter)
    assert sum(cost_parts_s(one, spec=SPEC, adapter=adapter).values()) == pytest.approx(one.score_s)


def test_the_cached_copy_wins_until_its_backlog_outweighs_it() -> None:
    rule = rule_of("least-cost")
    assert order(rule, [view("cold"), view("warm", matched=900, backlog=800.0)])[0] == "warm"
    assert order(rule, [view("cold"), view("warm", matched=900, backlog=1000.0)])[0] == "cold"


def test_a_faster_server_wins_at_equal_work() -> None:
    assert order(rule_of("least-cost"), [view("slow"), view("fast", rate=2000.0)]) == ["fast", "slow"]


def test_long_prompts_avoid_answers_that_they_would_stall_and_short_ones_need_not() -> None:
    rule = rule_of("least-cost")
    busy = [view("waits", prompt=8000, backlog=3000.0), view("writes", prompt=8000, in_flight=10)]
    assert order(rule, busy)[0] == "waits"
    short = [view("waits", prompt=100, backlog=3000.0), view("writes", prompt=100, in_flight=10)]
    assert order(rule, short)[0] == "writes"


def test_a_popular_prefix_gets_a_copy_once_its_holder_writes_many_answers() -> None:
    def first(in_flight: int) -> str:
        holder = view("holder", prompt=9000, matched=8000, in_flight=in_flight)
        return order(rule_of("least-cost"), [holder, view("other", prompt=9000)])[0]

    # 1000 (1 + 0.15 L) + 50 L against 9000
    assert first(39) == "holder"
    assert first(41) == "other"


def test_a_prompt_that_is_cached_whole_still_goes_elsewhere_before_one_server_has_all_of_them() -> None:
    holder, other = view("holder", prompt=9000, matched=8999, in_flight=181), view("other", prompt=9000)
    assert order(rule_of("least-cost"), [holder, other])[0] == "other"


# -- adapters ----------------------------------------------------------------------------------------------------


def test_an_adapters_requests_stay_where_it_is_until_a_load_is_cheaper_than_the_queue() -> None:
    rule = rule_of("least-cost")

    def first(backlog: float) -> str:
        holder = view("holder", has_adapter=True, backlog=backlog)
        return order(rule, [holder, view("other", free_slot=True)], adapter="x")[0]

    assert first(450.0) == "holder"
    assert first(550.0) == "other"


def test_a_load_that_drops_another_adapter_counts_twice() -> None:
    rule = rule_of("least-cost")
    views = [view("free", free_slot=True, backlog=400.0), view("full")]
    assert order(rule, views, adapter="x") == ["free", "full"]
    views[0].backlog_tokens = 600.0
    assert order(rule, views, adapter="x") == ["full", "free"]


def test_base_model_requests_do_not_mind_adapters() -> None:
    views = [view("a", has_adapter=True, backlog=10.0), view("b", free_slot=True, backlog=5.0), view("c")]
    assert order(rule_of("least-cost"), views) == ["c", "b", "a"]


def test_the_reason_says_what_the_choice_was_for() -> None:
    def reason(*views: View, adapter: str = "") -> str:
        return rule_of("least-cost").rank(views, session="", adapter=adapter)[1]

    assert reason(view("a", matched=500), view("b")) == "prefix"
    assert reason(view("a", has_adapter=True), view("b"), adapter="x") == "lora"
    assert reason(view("a"), view("b", backlog=900.0)) == "load"


# -- affinity ----------------------------------------------------------------------------------------------------


def test_affinity_takes_the_longest_match_whatever_the_load() -> None:
    rule = rule_of("affinity")
    views = [view("idle", matched=100), view("busy", matched=200, in_flight=90)]
    assert order(rule, views) == ["busy", "idle"]


def test_affinity_looks_for_the_adapter_first_then_for_a_free_slot_then_for_the_prefix() -> None:
    views = [view("match", matched=900), view("slot", free_slot=True), view("holder", has_adapter=True)]
    assert order(rule_of("affinity"), views, adapter="x") == ["holder", "slot", "match"]


def test_affinity_without_a_match_takes_the_least_load() -> None:
    ordered, reason = rule_of("affinity").rank(
        [view("a", in_flight=2), view("b", in_flight=1)], session="", adapter=""
    )
    assert (ordered[0].name, reason) == ("b", "load")


# -- round robin -------------------------------------------------------------------------------------------------


def test_round_robin_gives_each_its_turn_and_the_next_as_fallback() -> None:
    rule = rule_of("round-robin")
    views = [view(n) for n in "cab"]
    assert [order(rule, views) for _ in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
def test_round_robin_stays_fair_while_endpoints_come_and_go(toggles: list[str]) -> None:
    """Whoever is there all along is never passed over for a whole round, nor served twice in one."""
    rule, members = rule_of("round-robin"), {"m", "n"}
    picks: list[str] = []
    for toggled in ["", *toggles]:
        members ^= {toggled} - {""}
        picks.append(order(rule, [view(n) for n in members])[0])
    for steady in "mn":
        turns = [i for i, name in enumerate(picks) if name == steady]
        other = "n" if steady == "m" else "m"
        for first, second in pairwise(turns):
            assert other in picks[first + 1 : second]


# -- power of two, least load, session ---------------------------------------------------------------------------


def test_least_load_takes_the_fewest_in_flight() -> None:
    assert order(
        rule_of("least-load"), [view(n, in_flight=i) for n, i in zip("abc", (3, 1, 2), strict=True)]
    ) == [
        "b",
        "c",
        "a",
    ]


def test_power_of_two_never_takes_the_most_loaded_but_does_take_the_second() -> None:
    views = [view(n, in_flight=i) for i, n in enumerate("abcd")]
    counts = firsts(rule_of("power-of-two"), views, times=1200)
    assert counts["d"] == 0
    # Of the six pairs a is in three, b is the better of two, c of one.
    assert 500 < counts["a"] < 700
    assert 300 < counts["b"] < 500
    assert 120 < counts["c"] < 280


def test_power_of_two_falls_back_on_the_other_of_the_two() -> None:
    views = [view(n, in_flight=i) for i, n in enumerate("abcd")]
    rule = rule_of("power-of-two")
    for _ in range(50):
        first, second, *_ = rule.rank(views, session="", adapter="")[0]
        assert first.in_flight < second.in_flight


NAMES = [f"pod-{i}" for i in range(10)]


def sessions_to(names: list[str], *, sessions: int = 500) -> dict[str, str]:
    rule, views = rule_of("session"), [view(n) for n in names]
    return {f"s{i}": order(rule, views, session=f"s{i}")[0] for i in range(sessions)}


def test_a_session_keeps_its_endpoint_whatever_the_load_and_the_order_of_the_list() -> None:
    rule = rule_of("session")
    chosen = {
        order(rule, [view(n, in_flight=i * k) for i, n in enumerate(names)], session="me")[0]
        for k, names in enumerate([NAMES, NAMES[::-1], sorted(NAMES)])
    }
    assert len(chosen) == 1


def test_an_endpoint_that_leaves_moves_only_its_own_sessions() -> None:
    before, after = sessions_to(NAMES), sessions_to(NAMES[1:])
    moved = {s for s in before if before[s] != after[s]}
    assert moved == {s for s in before if before[s] == NAMES[0]}
    assert len({after[s] for s in moved}) > 4  # and those spread over the others


def test_an_endpoint_that_joins_takes_its_share_and_moves_nothing_else() -> None:
    before, after = sessions_to(NAMES[1:]), sessions_to(NAMES)
    moved = [s for s in before if before[s] != after[s]]
    assert all(after[s] == NAMES[0] for s in moved)
    assert 20 < len(moved) < 100  # 50 on average


def test_sessions_spread_over_all_endpoints() -> None:
    counts = Counter(sessions_to(NAMES).values())
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 100


def test_a_request_without_a_session_goes_by_load() -> None:
    ordered, reason = rule_of("session").rank([view("a", in_flight=1), view("b")], session="", adapter="")
    assert (ordered[0].name, reason) == ("b", "load")
