"""One decision: the gain threshold, the load thresholds, the candidates that are left, and that there is
always one.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.policy import PolicySpec, RuleName
from epp.config.routing import LoadSettings
from epp.picker.scheduling.rules import RULES
from epp.picker.scheduling.schedule import (
    MOST,
    Choice,
    Scheduler,
    fewest,
    over_limits,
)
from tests.unit.picker.scheduling.snapshots import UNKNOWN, SeenEndpoint, request, snapshot

LOAD = LoadSettings(max_waiting=10, max_kv_usage=0.9, max_undone_tokens=1000)


def scheduler_of(spec: PolicySpec) -> Scheduler:
    return Scheduler(spec, RULES[spec.rule](spec, random.Random(0)))


def choose(seen: list[SeenEndpoint], *, rule: RuleName = "least-cost", load: LoadSettings = LOAD) -> Choice:
    return scheduler_of(PolicySpec(rule=rule, load=load)).schedule(request(seen), snapshot(seen))


def over(one: SeenEndpoint, *, load: LoadSettings = LOAD) -> list[str]:
    return list(over_limits(load, snapshot([one])))


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


def test_unknown_load_is_over_no_threshold() -> None:
    assert (
        over(
            SeenEndpoint("a", waiting=UNKNOWN, kv_usage=UNKNOWN),
            load=LoadSettings(max_waiting=0, max_kv_usage=0),
        )
        == []
    )


def test_endpoints_left_out_are_ordered_by_load() -> None:
    choice = choose(
        [
            SeenEndpoint("a", waiting=11, in_flight=5),
            SeenEndpoint("b", waiting=11, in_flight=3),
            SeenEndpoint("c"),
        ]
    )
    assert choice.places == [2, 1, 0]


def test_plain_rules_ignore_the_thresholds() -> None:
    choice = choose([SeenEndpoint("a", waiting=99), SeenEndpoint("b", in_flight=1)], rule="least-load")
    assert (choice.places, choice.reason, choice.left_out) == ([0, 1], "load", {})


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
def test_exactly_those_over_a_threshold_are_left_out(
    seen: list[SeenEndpoint],
) -> None:
    seen = [SeenEndpoint(**{**vars(s), "name": f"e{n}"}) for n, s in enumerate(seen)]
    choice = choose(seen)
    heavy = {n for n, s in enumerate(seen) if s.waiting > 10 or s.kv_usage > 0.9 or s.backlog > 1000}
    assert len(choice.places) == len(set(choice.places)) == min(MOST, len(seen))
    assert (choice.reason == "saturated") == (len(heavy) == len(seen))
    if choice.reason == "saturated":
        assert not choice.left_out
        return
    assert {n for n in range(len(seen)) if choice.excluded(n)} == heavy
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
