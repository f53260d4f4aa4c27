"""The set of endpoints follows its source, and says which endpoints may be picked for which request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epp.config.policy import PolicySpec
from epp.endpoints import pages
from epp.endpoints.fleet import Fleet
from epp.endpoints.state import Booking
from epp.types import Endpoint, EndpointMetrics, EndpointName
from tests.unit.endpoints.lettered import endpoint

SPEC = PolicySpec()


def a_fleet(*endpoints: Endpoint) -> Fleet:
    fleet = Fleet(SPEC)
    fleet.set_endpoints(endpoints, now=0.0)
    return fleet


def fail(fleet: Fleet, *names: str, times: int = 3) -> None:
    for name in names:
        state = fleet.get(EndpointName(name))
        assert state is not None
        for _ in range(times):
            state.scrape_failed(now=1.0)


def ready(fleet: Fleet) -> list[str]:
    return sorted(s.endpoint.name for s in fleet.ready())


def names_serving(fleet: Fleet, model: str) -> list[str]:
    return sorted(fleet.in_slot(slot).endpoint.name for slot in fleet.serving(model))


def holds(fleet: Fleet, name: str, adapter: str) -> None:
    state = fleet.get(EndpointName(name))
    assert state is not None
    pages.take_in(state, EndpointMetrics(scraped_at=1.0, active_adapters=frozenset({adapter})), now=1.0)


def test_a_new_list_says_what_came_what_went_and_what_was_restarted() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"), endpoint("d"))
    change = fleet.set_endpoints(
        [endpoint("a"), endpoint("b", host="10.9.9.9"), endpoint("c", incarnation="2"), endpoint("e")],
        now=1.0,
    )
    assert change.added == ("e",)
    assert change.removed == ("d",)
    assert change.restarted == ("b", "c")
    fleet.check_integrity()


def test_an_endpoint_that_stays_keeps_its_state_also_with_other_adapters() -> None:
    fleet = a_fleet(endpoint("a", model="m"))
    before = fleet.get(EndpointName("a"))
    change = fleet.set_endpoints([endpoint("a", model="m", adapters=("sql",))], now=1.0)
    assert fleet.get(EndpointName("a")) is before
    assert before is not None
    assert before.endpoint.adapters == {"sql"}
    assert change.restarted == ()


def test_an_endpoint_that_serves_another_model_is_another_server() -> None:
    fleet = a_fleet(endpoint("a", model="m"), endpoint("b", model="other"))
    state = fleet.get(EndpointName("a"))
    assert state is not None
    before = state.process
    change = fleet.set_endpoints([endpoint("a", model="other"), endpoint("b", model="other")], now=1.0)
    assert change.restarted == ("a",)
    assert state.process == before + 1
    fleet.check_integrity()


def test_addresses_lead_to_who_has_them_now() -> None:
    a, b = endpoint("a"), endpoint("b")
    fleet = a_fleet(a, b)
    swapped = [endpoint("a", host=b.address.host), endpoint("b", host=a.address.host)]
    fleet.set_endpoints(swapped, now=1.0)
    fleet.check_integrity()
    state = fleet.at(a.address)
    assert state is not None
    assert state.endpoint.name == "b"
    fleet.set_endpoints([], now=2.0)
    assert fleet.at(a.address) is None
    assert len(fleet) == 0


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


def test_a_restarted_server_starts_without_failures() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"))
    fail(fleet, "a")
    fleet.set_endpoints([endpoint("a", incarnation="2"), endpoint("b")], now=1.0)
    assert ready(fleet) == ["a", "b"]


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


LISTS = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.sampled_from(["", "1"])),
        unique_by=(lambda e: e[0], lambda e: e[1]),
    ),
    max_size=8,
)


@given(LISTS)
def test_the_fleet_is_always_exactly_the_last_list(lists: list[list[tuple[str, int, str]]]) -> None:
    fleet, known = Fleet(SPEC), dict[EndpointName, Endpoint]()
    for listed in lists:
        wanted = [endpoint(n, host=f"10.0.0.{host}", incarnation=i) for n, host, i in listed]
        change = fleet.set_endpoints(wanted, now=0.0)
        now_known = {e.name: e for e in wanted}
        assert set(change.added) == now_known.keys() - known.keys()
        assert set(change.removed) == known.keys() - now_known.keys()
        assert set(change.restarted) == {
            n
            for n in known.keys() & now_known.keys()
            if (known[n].address, known[n].incarnation) != (now_known[n].address, now_known[n].incarnation)
        }
        known = now_known
        assert {s.endpoint.name: s.endpoint for s in fleet.states()} == known
        for state in fleet.states():
            assert fleet.at(state.endpoint.address) is state
            state.book(Booking(tokens=5, booked_at=0.0), now=0.0)
        fleet.check_integrity()


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
