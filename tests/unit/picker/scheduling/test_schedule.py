"""One decision: thresholds, candidates, slots, and the record that shows what the rule saw."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from epp.base.types import Address, Endpoint, EndpointName, Role
from epp.config.policy import LoadSettings, Lora, PolicySpec, RuleName
from epp.picker.decision import Candidate
from epp.picker.scheduling.candidates import ShownCandidates
from epp.picker.scheduling.least_cost import LeastCost
from epp.picker.scheduling.rules import RULES
from epp.picker.scheduling.schedule import MOST, Choice, Scheduler, fewest, over_limits
from epp.picker.scheduling.snapshot import Roster, SentPick, Snapshot
from tests.unit.picker.scheduling.snapshots import UNKNOWN, SeenEndpoint, request_of, snapshot, weighed

LOAD = LoadSettings(max_waiting=10, max_kv_usage=0.9, max_undone_tokens=1000)


def scheduler_of(spec: PolicySpec) -> Scheduler:
    return Scheduler(spec, RULES[spec.rule](spec, random.Random(0)))


def choose(seen: list[SeenEndpoint], *, rule: RuleName = "least-cost", load: LoadSettings = LOAD) -> Choice:
    return scheduler_of(PolicySpec(rule=rule, load=load)).schedule(request_of(seen), snapshot(seen))


def over(one: SeenEndpoint) -> list[str]:
    return list(over_limits(LOAD, snapshot([one])))


@pytest.mark.parametrize(
    ("above", "at_limit", "why"),
    [
        (SeenEndpoint("a", waiting=11), SeenEndpoint("a", waiting=10), "waiting"),
        (SeenEndpoint("a", kv_usage=0.91), SeenEndpoint("a", kv_usage=0.9), "kv_usage"),
        (SeenEndpoint("a", backlog=1001.0), SeenEndpoint("a", backlog=1000.0), "undone"),
    ],
)
def test_load_above_a_threshold_crosses_it_and_load_at_threshold_does_not(
    above: SeenEndpoint, at_limit: SeenEndpoint, why: str
) -> None:
    assert over(above) == [why]
    assert over(at_limit) == []


def test_excluded_endpoints_go_by_load_and_those_that_fail_are_last() -> None:
    loads = {"a": 5, "b": 3}
    seen = [*(SeenEndpoint(name, waiting=11, in_flight=n) for name, n in loads.items()), SeenEndpoint("c")]
    assert choose(seen).places == [2, 1, 0]
    b_fails = replace(snapshot(seen), failing=np.array([False, True, False]))
    assert scheduler_of(PolicySpec(load=LOAD)).schedule(request_of(seen), b_fails).places == [2, 0, 1]


def test_a_deadline_leads_to_no_excluded_server_nor_from_a_named_one() -> None:
    seen = [SeenEndpoint("a", backlog=900.0), SeenEndpoint("b"), SeenEndpoint("c", backlog=500.0)]
    b_fails = replace(snapshot(seen), failing=np.array([False, True, False]))
    urgent = replace(request_of(seen), left_s=0.1)
    assert scheduler_of(PolicySpec()).schedule(urgent, b_fails).places[0] == 2
    named = replace(urgent, holder=0)
    assert scheduler_of(PolicySpec()).schedule(named, snapshot(seen)).places[0] == 0
    on_trial = replace(snapshot(seen), failing=np.array([True, False, False]), trials=[0])
    for left_s, expected in ((1.5, (1, "load")), (2.0, (0, "trial"))):
        choice = scheduler_of(PolicySpec()).schedule(replace(urgent, left_s=left_s), on_trial)
        assert (choice.places[0], choice.reason) == expected
    loaded = [SeenEndpoint("a", backlog=900.0, has_adapter=True), SeenEndpoint("b", backlog=300.0)]
    spec = PolicySpec(lora=Lora(load_seconds=0.5))
    request = replace(request_of(loaded), left_s=0.1)
    assert scheduler_of(spec).schedule(request, snapshot(loaded, adapter="x")).places[0] == 0


def test_if_all_are_over_a_threshold_the_rule_ranks_them_all() -> None:
    choice = choose([SeenEndpoint(name, waiting=n, in_flight=n) for name, n in (("a", 300), ("b", 200))])
    assert (choice.places, choice.reason, choice.excluded) == ([1, 0], "saturated", {})


def test_a_refused_request_goes_back_if_others_are_over_a_threshold() -> None:
    scheduler, seen = scheduler_of(PolicySpec(load=LOAD)), [SeenEndpoint("a"), SeenEndpoint("b", waiting=11)]
    scheduler.rule.ended(SentPick(EndpointName("a"), 0.0, prefix=1), computed=False)
    a_refuses = replace(snapshot(seen), no_token=np.array([True, False]))
    assert scheduler.schedule(request_of(seen, prefix=1), a_refuses).places == [0, 1]


def test_plain_rules_ignore_the_thresholds() -> None:
    choice = choose([SeenEndpoint("a", waiting=99), SeenEndpoint("b", in_flight=1)], rule="least-load")
    assert (choice.places, choice.reason, choice.excluded) == ([0, 1], "load", {})


ENDPOINTS = st.lists(
    st.builds(
        SeenEndpoint,
        st.just("e"),
        cached=st.integers(0, 999),
        waiting=st.integers(0, 20) | st.just(UNKNOWN),
        kv_usage=st.floats(0, 1) | st.just(UNKNOWN),
        backlog=st.floats(0, 2000),
    ),
    min_size=1,
    max_size=25,
)


@given(ENDPOINTS)
def test_exactly_those_over_a_threshold_are_excluded(seen: list[SeenEndpoint]) -> None:
    seen = [SeenEndpoint(**{**vars(s), "name": f"e{n}"}) for n, s in enumerate(seen)]
    choice = choose(seen)
    heavy = {n for n, s in enumerate(seen) if s.waiting > 10 or s.kv_usage > 0.9 or s.backlog > 1000}
    assert len(choice.places) == len(set(choice.places)) == min(MOST, len(seen))
    assert (choice.reason == "saturated") == (len(heavy) == len(seen))
    if choice.reason == "saturated":
        assert not choice.excluded
        return
    assert {n for n in range(len(seen)) if choice.why_excluded(n)} == heavy
    shown_light = [place for place in choice.places if place not in heavy]
    assert shown_light == choice.places[: len(shown_light)]
    assert len(shown_light) == min(MOST, len(seen) - len(heavy))


@given(
    size=st.sampled_from([199, 200, 201, 1000]),
    different=st.sampled_from([1, 2, 12, 10**6]),
    seed=st.integers(0, 1000),
)
def test_smallest_of_very_many_scores_are_those_that_full_sort_puts_first(
    size: int, different: int, seed: int
) -> None:
    rng = random.Random(seed)
    keys = [rng.randrange(different) for _ in range(size)]
    places = fewest(np.array(keys, dtype=float), rng)
    assert len(set(places)) == len(places) == MOST
    assert [keys[place] for place in places] == sorted(keys)[:MOST]


def test_among_many_equal_scores_each_may_be_first_and_each_may_be_second() -> None:
    rng, key = random.Random(0), np.zeros(40)
    orders = [fewest(key, rng) for _ in range(400)]
    assert {order[0] for order in orders} == {order[1] for order in orders} == set(range(40))


def test_without_a_random_generator_equal_scores_keep_their_order() -> None:
    assert fewest(np.zeros(40), None) == list(range(MOST))


FOUR = [SeenEndpoint(name, backlog=100.0 * n, in_flight=n) for n, name in enumerate("dbca")]


def test_a_roster_has_rank_and_address_of_each_slot() -> None:
    front = Address("10.1.1.1", 80)
    roster = Roster(
        [
            Endpoint(EndpointName("c"), Address("10.0.0.1", 80)),
            Endpoint(EndpointName("a"), Address("10.0.0.2", 80), behind=front, rank=0),
            Endpoint(EndpointName("b"), Address("10.0.0.3", 80), role=Role.PREFILL),
        ]
    )
    assert roster.turn.tolist() == [2, 0, 1]
    assert roster.addresses == [Address("10.0.0.1", 80), front, Address("10.0.0.3", 80)]
    assert roster.answers.tolist() == [True, True, False]


def test_every_picker_hashes_a_name_alike_whatever_its_slot() -> None:
    one, other = (snapshot([SeenEndpoint(name) for name in names]).roster for names in ("abc", "cab"))
    assert len({*one.names_hashed.tolist()}) == 3
    assert one.names_hashed.tolist() == [*other.names_hashed.tolist()[1:], other.names_hashed[0]]


def test_candidates_narrowed_twice_keep_their_slots_and_their_numbers() -> None:
    adapters = snapshot(FOUR, adapter="x")
    some = replace(adapters, failure_share=np.array([0.0, 0.1, 0.2, 0.3]), unreported_picks=3.0)
    few = some.narrowed(np.array([3, 1, 2])).narrowed(np.array([2, 0]))
    assert list(few.slots) == [2, 3]
    assert few.undone_tokens.tolist() == [200, 300]
    assert few.failure_share is not None
    assert few.failure_share.tolist() == [0.2, 0.3]
    assert few.has_adapter is not None
    assert len(few.has_adapter) == len(few) == 2
    assert few.unreported_picks == 3.0
    assert few.roster.turn[few.at].tolist() == [2, 0], "the names are c and a"
    assert [few.place(slot) for slot in range(5)] == [None, None, 0, 1, None]


def test_no_candidate_counts_as_failing_among_those_that_are_left() -> None:
    seen = replace(snapshot(FOUR), failing=np.array([True, False, False, False]), trials=[0])
    few = seen.narrowed(np.array([1, 2]))
    assert (few.failing, few.trials) == (None, ())


def test_a_server_whose_answers_all_fail_counts_ten_more_requests() -> None:
    seen = snapshot(FOUR)
    assert seen.burden().tolist() == [0, 1, 2, 3]
    assert replace(seen, failure_share=np.array([1.0, 0.0, 0.5, 0.0])).burden().tolist() == [10, 1, 7, 3]


SPEC = PolicySpec(load=LoadSettings(max_waiting=5), lora=Lora(load_seconds=0.5))


def shown(
    seen: list[SeenEndpoint],
    *,
    adapter: str = "",
    look: Snapshot | None = None,
    sent: Sequence[SentPick] = (),
) -> list[Candidate]:
    """Return the candidates for a request at 10.0 for the prefix 1, after other requests were sent."""
    request, look = request_of(seen, prefix=1, at=10.0), look or snapshot(seen, adapter=adapter)
    rule = LeastCost(SPEC, random.Random(0))
    for each in sent:
        rule.committed(each)
    choice = Scheduler(SPEC, rule).schedule(request, look)
    best = int(request.cached_tokens.max())
    return list(ShownCandidates(choice.only_ranked(), SPEC, best))


def test_a_candidate_shows_the_numbers_that_the_rule_used() -> None:
    heavy = SeenEndpoint("a", cached=128, backlog=5000.7, in_flight=2, waiting=9, kv_usage=0.5, rate=10_000.0)
    candidate = shown([heavy, SeenEndpoint("b")], adapter="sql")[1]
    assert (candidate.name, candidate.address) == ("a", Address("10.0.0.1", 8000))
    assert (candidate.matched_tokens, candidate.uncached_tokens, candidate.backlog_tokens) == (128, 872, 5000)
    assert (candidate.in_flight, candidate.waiting, candidate.kv_usage) == (2, 9, 0.5)
    # this endpoint is excluded, so it has no score
    assert (candidate.prefill_tokens_per_s, candidate.score_s) == (10_000.0, 0.0)
    assert candidate.parts_s["backlog"] == pytest.approx(0.50007)
    assert candidate.parts_s["lora"] == 2 * SPEC.lora.load_seconds  # no slot for an adapter is free
    assert candidate.excluded == "waiting"


def test_a_load_that_drops_an_adapter_takes_as_long_as_any_other() -> None:
    given = weighed([SeenEndpoint("a"), SeenEndpoint("b", free_slot=True)], adapter="sql", load_s=0.5)
    prefill_s = given.uncached_tokens / given.seen.rate
    assert given.first_token_s(slice(None)) - prefill_s == pytest.approx(0.5)


def test_unknown_load_is_shown_as_unknown() -> None:
    candidate = shown([SeenEndpoint("a", waiting=UNKNOWN, kv_usage=UNKNOWN)])[0]
    assert (candidate.waiting, candidate.kv_usage) == (None, None)


def test_the_parts_sum_to_the_score_if_a_copy_has_half_the_price() -> None:
    holder = SeenEndpoint("a", cached=800, backlog=9000.0, in_flight=40)
    sent = [SentPick(EndpointName("a"), 5.0, prefix=1)] * 4
    first, second = shown([holder, SeenEndpoint("c", in_flight=10)], sent=sent)
    assert first.name == "c"
    assert second.score_s == pytest.approx(sum(second.parts_s.values()))
    assert first.score_s == pytest.approx(sum(first.parts_s.values()))
    paid = (0.2 + 0.8 / 2) * (1 + 700 / 65_536)
    assert first.parts_s["prefill"] == pytest.approx(paid)
    assert first.parts_s["stall"] == pytest.approx(0.15 * 10 * paid)
