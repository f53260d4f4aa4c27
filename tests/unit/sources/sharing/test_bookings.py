"""The requests of other pickers, booked on the states of their servers."""

from __future__ import annotations

from epp.picker.endpoints import pages
from epp.picker.endpoints.endpoint_state import Booking, EndpointState
from epp.sources.sharing import bookings
from tests.unit.picker.endpoints.bookings import a_state, page


def scraped_state(*, running: int) -> EndpointState:
    state = a_state()
    pages.take_in(state, page(1.0, running=running), now=1.0)
    return state


def test_a_request_that_began_after_the_scrape_adds_to_what_the_page_shows() -> None:
    state = scraped_state(running=3)
    bookings.book(state, Booking(tokens=100, booked_at=2.0), at=2.0, now=2.5)
    assert state.load(state.metrics) == 4


def test_a_request_that_began_before_the_scrape_is_on_the_page_already() -> None:
    state = scraped_state(running=3)
    bookings.book(state, Booking(tokens=100, booked_at=0.5), at=0.5, now=2.0)
    assert state.load(state.metrics) == 3
    assert state.peers_in_flight == 1


def test_the_end_of_a_request_frees_its_place_and_its_tokens() -> None:
    state, booking = scraped_state(running=3), Booking(tokens=100, booked_at=2.0)
    bookings.book(state, booking, at=2.0, now=2.0)
    bookings.release(state, booking, computed=True, at=2.2, now=2.2)
    assert state.load(state.metrics) == 3
    assert state.peers_in_flight == 0
    assert state.backlog.tokens == 0


def test_a_request_that_its_picker_let_go_stays_at_the_server_until_the_next_page() -> None:
    state, booking = scraped_state(running=3), Booking(tokens=100, booked_at=2.0)
    bookings.book(state, booking, at=2.0, now=2.0)
    bookings.detach(state)
    assert state.peers_in_flight == 0
    assert state.load(state.metrics) == 4
    assert state.backlog.tokens == 100
    pages.take_in(state, page(3.0, running=4), now=3.0)
    assert state.load(state.metrics) == 4
