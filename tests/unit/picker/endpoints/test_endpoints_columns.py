"""Which endpoints may be picked for which request, and their numbers in a snapshot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.errors import NoEndpointError
from epp.base.types import Address, EndpointMetrics, EndpointName, Role
from epp.picker.endpoints.backlog import Booking
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet
from tests.unit.picker.endpoints.fleets import SPEC, a_fleet, fail_scrapes
from tests.unit.picker.endpoints.lettered import endpoint


def names_serving(fleet: Fleet, model: str) -> list[str]:
    return sorted(fleet.in_slot(slot).endpoint.name for slot in fleet.served.slots(model))


def holds(fleet: Fleet, name: str, adapter: str) -> None:
    state = fleet.get(EndpointName(name))
    assert state is not None
    state.take_page(EndpointMetrics(scraped_at=1.0, active_adapters=frozenset({adapter})), now=1.0)


def test_a_declared_adapter_is_also_served_where_it_was_loaded_at_run_time() -> None:
    fleet = a_fleet(
        endpoint("a", model="m", adapters=["x"]), endpoint("b", model="m"), endpoint("c", model="m")
    )
    holds(fleet, "b", "x")
    assert names_serving(fleet, "x") == ["a", "b"]


def test_a_base_model_is_not_taken_for_an_adapter() -> None:
    fleet = a_fleet(endpoint("a", model="m", adapters=["x"]))
    assert fleet.served.adapter("m") == ""
    assert fleet.served.adapter("x") == "x"
    assert fleet.served.adapter("never-heard-of") == ""


def test_a_snapshot_does_not_change_after_it_was_made() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"))
    state = fleet.get(EndpointName("a"))
    assert state is not None
    state.take_page(EndpointMetrics(scraped_at=0.0, running=3, waiting=2, kv_usage=0.5), now=0.0)
    before = fleet.snapshot([0, 1], model="m", adapter="", spec=SPEC, now=0.0)
    state.book(Booking(tokens=500, booked_at=0.0), now=0.0)
    state.take_page(EndpointMetrics(scraped_at=1.0, running=9, waiting=9, kv_usage=0.9), now=1.0)
    after = fleet.snapshot([0, 1], model="m", adapter="", spec=SPEC, now=1.0)
    assert (before.in_flight[0], before.waiting[0], before.kv_usage[0]) == (5, 2, 0.5)
    assert (after.in_flight[0], after.waiting[0], after.kv_usage[0]) == (18, 9, 0.9)


def test_unknown_and_stale_numbers_are_nan() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"))
    a, b, c = fleet.states()
    a.take_page(EndpointMetrics(scraped_at=0.0, running=7, waiting=2, kv_usage=0.5), now=0.0)
    b.take_page(EndpointMetrics(scraped_at=9.0, running=3, waiting=1), now=9.0)
    for state in (a, b, c):
        state.book(Booking(tokens=5, booked_at=9.0), now=9.0)
    seen = fleet.snapshot(range(3), model="m", adapter="", spec=SPEC, now=10.0)
    assert seen.in_flight.tolist() == [1, 5, 1], "only the second page is fresh"
    np.testing.assert_equal(seen.waiting, [np.nan, 1, np.nan])
    np.testing.assert_equal(seen.kv_usage, [np.nan, np.nan, np.nan])


def test_a_snapshot_of_some_slots_has_their_numbers_in_the_order_asked_for() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"))
    for tokens, state in zip((100, 200, 300), fleet.states(), strict=True):
        state.book(Booking(tokens=tokens, booked_at=0.0), now=0.0)
    seen = fleet.snapshot([2, 0], model="m", adapter="", spec=SPEC, now=0.0)
    assert (list(seen.slots), seen.undone_tokens.tolist()) == ([2, 0], [300, 100])
    assert fleet.columns.block_tokens[seen.at].tolist() == [1, 1]


def test_snapshot_shows_which_endpoints_hold_the_adapter_or_have_free_slot() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"))
    a, b, _ = fleet.states()
    a.use_adapter("x", most=2, now=0.0)
    b.take_page(EndpointMetrics(scraped_at=0.0, max_lora=1, loaded_adapters=frozenset({"y"})), now=0.0)
    seen = fleet.snapshot(range(3), model="x", adapter="x", spec=SPEC, now=0.0)
    assert seen.has_adapter is not None
    assert seen.free_slot is not None
    assert (seen.has_adapter.tolist(), seen.free_slot.tolist()) == ([True, False, False], [True, False, True])
    assert fleet.snapshot(range(3), model="m", adapter="", spec=SPEC, now=0.0).has_adapter is None


def test_only_endpoints_at_the_allowed_addresses_are_candidates() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"))
    allowed = {endpoint("c").address, endpoint("a").address, endpoint("z").address}
    assert fleet.candidates("m", subset=allowed) == [0, 2]
    front = Address("10.1.1.1", 80)
    ranks = [replace(endpoint(name), rank=n, behind=front) for n, name in enumerate("ab")]
    ranked = a_fleet(*ranks, endpoint("c"))
    assert ranked.candidates("m", subset={front}) == [0, 1]
    with pytest.raises(NoEndpointError) as raised:
        ranked.candidates("m", subset={ranks[0].address})
    assert raised.value.reason == "subset_empty", "the data plane knows the ranks by their front"


def test_endpoints_that_answer_are_candidates() -> None:
    fleet = a_fleet(
        replace(endpoint("p"), role=Role.PREFILL),
        replace(endpoint("d"), role=Role.DECODE),
        replace(endpoint("b"), role=Role.BOTH),
    )
    assert fleet.disaggregated
    assert (fleet.candidates("m", subset=None), fleet.prefillers("m", subset=None)) == ([1, 2], [0, 2])
    fail_scrapes(fleet, "p")
    assert fleet.prefillers("m", subset=None) == [2]
    assert fleet.prefillers("m", subset={endpoint("d").address}) == []
    assert not a_fleet(endpoint("a")).disaggregated


EVENTS = st.sampled_from(["book", "end", "detach", "page", "fail", "adapter", "restart", "leave"])


@pytest.mark.slow
@given(st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=40))
def test_after_any_events_the_columns_agree_with_the_states(events: list[tuple[str, int]]) -> None:
    fleet, now = a_fleet(*map(endpoint, "abcd")), 0.0
    held: dict[EndpointState, list[Booking]] = {state: [] for state in fleet.states()}
    for event, number in events:
        now += 0.5
        state = fleet.in_slot(number % len(fleet))
        if event == "book":
            held[state].append(Booking(tokens=100 * number, booked_at=now))
            state.book(held[state][-1], now=now)
        elif event == "end" and held[state]:
            state.release(held[state].pop(), computed=number > 1, now=now)
        elif event == "detach" and held[state]:
            held[state].pop()
            state.detach()
        elif event == "page":
            page = EndpointMetrics(
                scraped_at=now,
                running=number,
                waiting=number,
                prompt_tokens=50 * now,
                loaded_adapters=frozenset("xyz"[:number]),
            )
            state.take_page(page, now=now)
        elif event == "fail":
            state.scrape_failed(now=now)
        elif event == "adapter":
            state.use_adapter("wxyz"[number], most=2, now=now)
        elif event == "restart":
            state.forget_server(now=now)
        elif event == "leave" and len(fleet) > 1:
            fleet.set_endpoints([s.endpoint for s in fleet.states() if s is not state], now=now)
        assert state.load(state.metrics) >= state.in_flight == len(held[state])
        fleet.check_integrity()
