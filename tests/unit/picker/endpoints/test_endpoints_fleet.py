"""The set of endpoints follows its source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.types import Endpoint, EndpointName
from epp.picker.endpoints.backlog import Booking
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet
from tests.unit.picker.endpoints.fleets import SPEC, a_fleet, fail_scrapes, ready
from tests.unit.picker.endpoints.lettered import endpoint


def test_endpoint_that_stays_keeps_its_state_even_if_its_adapters_change() -> None:
    fleet = a_fleet(endpoint("a", model="m"))
    before = fleet.get(EndpointName("a"))
    change = fleet.set_endpoints([endpoint("a", model="m", adapters=("sql",))], now=1.0)
    assert fleet.get(EndpointName("a")) is before
    assert before is not None
    assert before.endpoint.adapters == {"sql"}
    assert change.restarted == []


def test_an_endpoint_that_serves_another_model_is_another_server() -> None:
    fleet = a_fleet(endpoint("a", model="m"), endpoint("b", model="other"))
    state = fleet.get(EndpointName("a"))
    assert state is not None
    before = state.process
    change = fleet.set_endpoints([endpoint("a", model="other"), endpoint("b", model="other")], now=1.0)
    assert change.restarted == [state]
    assert state.process == before + 1
    fleet.check_integrity()


def test_a_restarted_server_starts_without_failures() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"))
    fail_scrapes(fleet, "a")
    fleet.set_endpoints([endpoint("a", incarnation="2"), endpoint("b")], now=1.0)
    assert ready(fleet) == ["a", "b"]


LISTS = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.sampled_from(["", "1"])),
        unique_by=(lambda e: e[0], lambda e: e[1]),
    ),
    max_size=8,
)


def names(states: list[EndpointState]) -> set[EndpointName]:
    return {state.endpoint.name for state in states}


@pytest.mark.slow
@given(LISTS)
def test_the_fleet_is_always_exactly_the_last_list(lists: list[list[tuple[str, int, str]]]) -> None:
    fleet, known = Fleet(SPEC), dict[EndpointName, Endpoint]()
    for listed in lists:
        wanted = [endpoint(n, host=f"10.0.0.{host}", incarnation=i) for n, host, i in listed]
        change = fleet.set_endpoints(wanted, now=0.0)
        now_known = {e.name: e for e in wanted}
        assert names(change.added) == now_known.keys() - known.keys()
        assert names(change.removed) == known.keys() - now_known.keys()
        assert names(change.restarted) == {
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
