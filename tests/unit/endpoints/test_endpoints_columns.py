"""Which endpoints may be picked for which request, and their numbers in a snapshot."""

from __future__ import annotations

from epp.endpoints import pages
from epp.endpoints.fleet import Fleet
from epp.endpoints.state import Booking
from epp.types import EndpointMetrics, EndpointName
from tests.unit.endpoints.fleets import SPEC, a_fleet, fail, ready
from tests.unit.endpoints.lettered import endpoint


def names_serving(fleet: Fleet, model: str) -> list[str]:
    return sorted(fleet.in_slot(slot).endpoint.name for slot in fleet.serving(model))


def holds(fleet: Fleet, name: str, adapter: str) -> None:
    state = fleet.get(EndpointName(name))
    assert state is not None
    pages.take_in(state, EndpointMetrics(scraped_at=1.0, active_adapters=frozenset({adapter})), now=1.0)


def test_an_endpoint_whose_scrapes_fail_leaves_and_comes_back_when_they_succeed() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"))
    fail(fleet, "a", times=2)
    assert ready(fleet) == ["a", "b"]
    fail(fleet, "a", times=1)
    assert ready(fleet) == ["b"]
    state = fleet.get(EndpointName("a"))
    assert state is not None
    pages.take_in(state, EndpointMetrics(scraped_at=2.0), now=2.0)
    assert ready(fleet) == ["a", "b"]


def test_when_every_scrape_fails_the_scrapes_are_doubted_and_all_stay() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"))
    fail(fleet, "a", "b")
    assert ready(fleet) == ["a", "b"]


def test_a_models_only_server_that_is_down_is_not_replaced_by_servers_of_another_model() -> None:
    fleet = a_fleet(endpoint("a", model="m"), endpoint("b", model="n"))
    fail(fleet, "a")
    assert fleet.healthy(fleet.serving("m")) == []


def test_a_model_is_served_by_those_who_say_so() -> None:
    fleet = a_fleet(
        endpoint("a", model="m"), endpoint("b", model="m", adapters=["x"]), endpoint("c", model="n")
    )
    assert names_serving(fleet, "m") == ["a", "b"]
    assert names_serving(fleet, "x") == ["b"]
    assert names_serving(fleet, "n") == ["c"]


def test_a_model_that_nobody_names_is_tried_anywhere() -> None:
    assert names_serving(a_fleet(endpoint("a"), endpoint("b", model="m")), "unknown") == ["a", "b"]


def test_an_adapter_that_was_only_seen_may_go_to_any_server_of_the_same_base_model() -> None:
    fleet = a_fleet(endpoint("a", model="m"), endpoint("b", model="m"), endpoint("c", model="n"))
    holds(fleet, "a", "x")
    assert fleet.adapter("x") == "x"
    assert names_serving(fleet, "x") == ["a", "b"]


def test_a_declared_adapter_loaded_at_run_time_elsewhere_is_served_there_too() -> None:
    fleet = a_fleet(
        endpoint("a", model="m", adapters=["x"]), endpoint("b", model="m"), endpoint("c", model="m")
    )
    holds(fleet, "b", "x")
    assert names_serving(fleet, "x") == ["a", "b"]


def test_a_base_model_is_no_adapter() -> None:
    fleet = a_fleet(endpoint("a", model="m", adapters=["x"]))
    assert fleet.adapter("m") == ""
    assert fleet.adapter("x") == "x"
    assert fleet.adapter("never-heard-of") == ""


def test_a_snapshot_stays_as_it_was_made() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"))
    state = fleet.get(EndpointName("a"))
    assert state is not None
    pages.take_in(state, EndpointMetrics(scraped_at=0.0, running=3, waiting=2, kv_usage=0.5), now=0.0)
    before = fleet.snapshot([0, 1], model="m", adapter="", spec=SPEC, now=0.0)
    state.book(Booking(tokens=500, booked_at=0.0), now=0.0)
    pages.take_in(state, EndpointMetrics(scraped_at=1.0, running=9, waiting=9, kv_usage=0.9), now=1.0)
    after = fleet.snapshot([0, 1], model="m", adapter="", spec=SPEC, now=1.0)
    assert (before.in_flight[0], before.waiting[0], before.kv_usage[0]) == (5, 2, 0.5)
    assert (after.in_flight[0], after.waiting[0], after.kv_usage[0]) == (18, 9, 0.9)
