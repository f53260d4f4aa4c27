"""Every rule puts all candidates in order. The preferences of each rule but least-cost."""

import random
from collections import Counter
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from epp.base.types import EndpointName
from epp.config.policy import RuleName
from epp.picker.scheduling.rules import RULES
from epp.picker.scheduling.schedule import MOST
from epp.picker.scheduling.snapshot import SentPick
from tests.unit.picker.scheduling.orders import firsts, order, rule_of
from tests.unit.picker.scheduling.snapshots import SeenEndpoint, weighed

ALL: list[RuleName] = list(get_args(RuleName))


def test_every_rule_name_of_a_policy_has_a_rule() -> None:
    assert set(RULES) == set(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@given(
    data=st.data(),
    count=st.integers(1, 25),
    session=st.sampled_from(["", "s1", "s2"]),
    beginning=st.sampled_from([0, 1, 2**64 - 1]),
    adapter=st.sampled_from(["", "x"]),
)
def test_order_names_each_candidate_once_and_all_of_them_if_there_are_few(
    *, name: RuleName, data: st.DataObject, count: int, session: str, beginning: int, adapter: str
) -> None:
    seen = [
        SeenEndpoint(
            f"e{i}",
            cached=data.draw(st.integers(0, 1000)),
            backlog=data.draw(st.floats(0, 1e6)),
            in_flight=data.draw(st.integers(0, 50)),
            has_adapter=data.draw(st.booleans()),
        )
        for i in range(count)
    ]
    given = weighed(seen, session=session, beginning=beginning, adapter=adapter)
    before = weighed(seen, session=session, beginning=beginning, adapter=adapter)
    ranked = rule_of(name).rank(given)
    assert len(ranked.places) == len(set(ranked.places)) == min(count, MOST)
    assert set(ranked.places) <= set(range(count))
    assert ranked.reason
    for column in ("undone_tokens", "rate", "in_flight", "waiting", "kv_usage"):
        # the rule does not change the caller's columns
        assert getattr(given.seen, column).tolist() == getattr(before.seen, column).tolist()
    assert given.uncached_tokens.tolist() == before.uncached_tokens.tolist()


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("round-robin", "session")])
def test_equal_candidates_are_chosen_by_chance_and_not_by_their_place(name: RuleName) -> None:
    counts = firsts(rule_of(name), [SeenEndpoint(n) for n in "abcd"])
    assert set(counts) == set("abcd")
    assert max(counts.values()) < 160  # 100 each on average


@pytest.mark.parametrize("name", ["least-cost", "affinity", "least-load"])
def test_the_fallback_among_equal_candidates_is_chosen_by_chance_too(name: RuleName) -> None:
    """A fixed second choice would get everything when the first choice is dead."""
    rule, seen = (
        rule_of(name),
        [SeenEndpoint("a", cached=900), *(SeenEndpoint(n, in_flight=1) for n in "bcd")],
    )
    if name == "least-load":
        seen[0].in_flight = 0
    orders = [order(rule, seen) for _ in range(100)]
    assert {o[0] for o in orders} == {"a"}
    assert {o[1] for o in orders} == set("bcd")


# -- affinity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("adapter", "most"), [("", 2_048.0), ("sql", 16_384.0)])
def test_affinity_leaves_a_match_or_an_adapter_that_is_too_busy(adapter: str, most: float) -> None:
    def chosen(undone: float) -> str:
        busy = SeenEndpoint("busy", 200, undone, in_flight=90, has_adapter=True)
        return order(rule_of("affinity"), [SeenEndpoint("idle", cached=100), busy], adapter=adapter)[0]

    assert chosen(most) == "busy"
    assert chosen(most + 1) == "idle"


def test_affinity_breaks_ties_by_the_tokens_to_compute_then_requests() -> None:
    seen = [
        SeenEndpoint("few tokens", backlog=10.0, in_flight=9),
        SeenEndpoint("many tokens", backlog=20.0),
        SeenEndpoint("few requests", backlog=10.0, in_flight=8),
    ]
    assert order(rule_of("affinity"), seen) == ["few requests", "few tokens", "many tokens"]


def test_affinity_looks_for_adapter_then_free_slot_then_prefix() -> None:
    seen = [
        SeenEndpoint("match", cached=900),
        SeenEndpoint("slot", free_slot=True),
        SeenEndpoint("holder", has_adapter=True),
    ]
    assert order(rule_of("affinity"), seen, adapter="x") == ["holder", "slot", "match"]


# -- round robin ---------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
def test_round_robin_stays_fair_while_endpoints_come_and_go(toggles: list[str]) -> None:
    """An endpoint that is there all the time is served exactly once in each round."""
    rule, members = rule_of("round-robin"), {"m", "n"}
    picks: list[str] = []
    for toggled in ["", *toggles]:
        members ^= {toggled} - {""}
        picks.append(order(rule, [SeenEndpoint(n) for n in members])[0])
    for steady in "mn":
        turns = [i for i, name in enumerate(picks) if name == steady]
        other = "n" if steady == "m" else "m"
        for first, second in pairwise(turns):
            assert other in picks[first + 1 : second]


# -- session -----------------------------------------------------------------------


NAMES = [f"pod-{i}" for i in range(10)]


def test_session_keeps_its_endpoint_whatever_the_load_and_order_of_list() -> None:
    rule = rule_of("session")
    chosen = {
        order(rule, [SeenEndpoint(n, in_flight=i * k) for i, n in enumerate(names)], session="me")[0]
        for k, names in enumerate([NAMES, NAMES[::-1], sorted(NAMES)])
    }
    assert len(chosen) == 1


def test_a_request_without_a_session_goes_by_load() -> None:
    ranked = rule_of("session").rank(weighed([SeenEndpoint("a", in_flight=1), SeenEndpoint("b")]))
    assert (ranked.places, ranked.reason) == ([1, 0], "load")


# -- prefix-hash ---------------------------------------------------------------------------------------------


KEYS = [random.Random(n).randrange(1, 2**64) for n in range(500)]


def owners(rule: str, names: list[str], *, in_flight: int = 0) -> dict[int, str]:
    """Return the first choice for each key: by its session, or by the beginning of its prompt."""
    seen = [SeenEndpoint(n, in_flight=in_flight) for n in names]
    if rule == "session":
        return {key: order(rule_of("session"), seen, session=str(key))[0] for key in KEYS}
    return {key: order(rule_of("prefix-hash"), seen, beginning=key)[0] for key in KEYS}


@pytest.mark.parametrize("rule", ["session", "prefix-hash"])
def test_each_key_has_one_owner_and_keys_spread_evenly(rule: str) -> None:
    before = owners(rule, NAMES)
    assert before == owners(rule, NAMES[::-1]) == owners(rule, NAMES, in_flight=30)
    counts = Counter(before.values())
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 100  # 50 on average
    after = owners(rule, NAMES[1:])
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key in before if before[key] == NAMES[0]}, "the same holds if it joins again"
    assert len({after[key] for key in moved}) > 4  # these spread over the other endpoints


def test_owner_at_its_bound_passes_requests_on_to_the_keys_next_endpoint() -> None:
    rule, key = rule_of("prefix-hash"), KEYS[0]
    idle = order(rule, [SeenEndpoint(n) for n in NAMES], beginning=key)

    def with_load(owners: int) -> list[str]:
        return order(
            rule, [SeenEndpoint(n, in_flight=owners if n == idle[0] else 8) for n in NAMES], beginning=key
        )

    # The bound is 1.25 times the mean, rounded up. It is 11 if the owner has 10 requests and each other
    # endpoint has 8, and it is 11 if the owner has 11.
    assert with_load(10) == idle
    assert with_load(11) == [*idle[1:], idle[0]]


@pytest.mark.parametrize("name", ["prefix-hash", "session", "least-cost", "random"])
def test_what_a_server_refused_goes_elsewhere_unless_it_is_served(name: RuleName) -> None:
    """If the server computes it after all, the client was at fault, and then two refusals in a row count."""
    rule, sent = rule_of(name), SentPick(EndpointName(NAMES[0]), 0.0, prefix=1, session="s", beginning=1)
    shown = weighed([SeenEndpoint(n) for n in NAMES], prefix=1, session="s", beginning=1)
    seen = replace(shown.seen, no_token=np.arange(len(NAMES)) < 2)
    for at, (computed, leaves) in enumerate([(False, [0]), (True, []), (False, []), (False, [0])]):
        rule.ended(replace(sent, at=float(at)), computed=computed)
        refusing = rule.refusing(shown.request, seen)
        assert (np.flatnonzero(refusing).tolist() if refusing is not None else []) == leaves
    assert rule.refusing(replace(shown.request, prefix=2, session="t", beginning=2), seen) is None


@given(load=st.lists(st.integers(0, 200), min_size=1, max_size=12), key=st.integers(1, 2**64 - 1))
def test_no_endpoint_passes_its_bound_while_another_is_under_its_own(load: list[int], key: int) -> None:
    seen = [SeenEndpoint(f"e{i}", in_flight=n) for i, n in enumerate(load)]
    first = order(rule_of("prefix-hash"), seen, beginning=key)[0]
    had = dict(zip([s.name for s in seen], load, strict=True))[first]
    assert had < max(4, 1.25 * (sum(load) + 1) / len(load) + 1)


def test_an_owner_takes_up_to_four_requests_even_if_others_are_idle() -> None:
    rule, key = rule_of("prefix-hash"), KEYS[0]
    owner = order(rule, [SeenEndpoint(n) for n in NAMES], beginning=key)[0]
    for in_flight, kept in ((3, True), (4, False)):
        seen = [SeenEndpoint(n, in_flight=in_flight if n == owner else 0) for n in NAMES]
        assert (order(rule, seen, beginning=key)[0] == owner) is kept


def test_a_prompt_without_a_full_chunk_goes_by_load() -> None:
    assert order(rule_of("prefix-hash"), [SeenEndpoint("busy", in_flight=1), SeenEndpoint("idle")]) == [
        "idle",
        "busy",
    ]
