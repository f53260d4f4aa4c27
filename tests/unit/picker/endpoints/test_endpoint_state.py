"""The state of one endpoint: its load, from scrapes and from requests that began and ended, and its undone
work.
"""

from __future__ import annotations

import pytest

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.backlog import Backlog
from tests.unit.picker.endpoints.bookings import a_state, book, booked, page, undone_at


def test_without_metrics_the_load_is_the_number_of_our_open_requests() -> None:
    state = a_state()
    first = book(state, 10, now=0.0)
    book(state, 10, now=0.0)
    assert state.load(None) == 2
    state.release(first, computed=True, now=1.0)
    assert state.load(None) == 1


@pytest.mark.parametrize("said", [{}, {"running": 40}, {"waiting": 40}])
def test_with_a_page_without_a_gauge_the_load_is_our_open_requests(
    said: dict[str, int],
) -> None:
    state = a_state()
    state.take_page(EndpointMetrics(scraped_at=1.0, **said), now=1.0)  # type: ignore[arg-type]  # gauges alone
    book(state, 10, now=1.0)
    assert state.load(state.metrics) == 1


def test_load_is_the_scraped_number_plus_our_picks_minus_our_ends_since() -> None:
    state = a_state()
    first = book(state, 10, now=0.0)
    state.take_page(page(1.0, running=5, waiting=2), now=1.0)
    assert state.load(state.metrics) == 7
    book(state, 10, now=1.1)
    book(state, 10, now=1.2)
    state.release(first, computed=True, now=1.3)
    assert state.load(state.metrics) == 8


def test_only_scrapes_count_a_request_after_it_was_let_go() -> None:
    state = a_state()
    state.take_page(page(0.0), now=0.0)
    book(state, 10, now=0.1)
    state.detach()
    assert state.in_flight == 0
    assert state.load(state.metrics) == 1  # picked since the scrape
    state.take_page(page(1.0, running=1), now=1.0)
    assert state.load(state.metrics) == 1
    state.take_page(page(2.0, running=0), now=2.0)
    assert state.load(state.metrics) == 0


def test_metrics_are_fresh_up_to_their_age_limit_and_unknown_beyond() -> None:
    state = a_state()
    assert state.fresh(now=0.0, stale_after_s=5.0) is None
    state.take_page(page(10.0, running=1), now=10.0)
    assert state.fresh(now=15.0, stale_after_s=5.0) is state.metrics
    assert state.fresh(now=15.1, stale_after_s=5.0) is None


def test_lost_bookings_go_after_ten_minutes_also_while_scrapes_fail() -> None:
    state = a_state()
    book(state, 100, now=0.0)
    state.detach()
    state.scrape_failed(now=599.0)
    assert len(state.backlog.bookings) == 1
    state.scrape_failed(now=601.0)
    assert len(state.backlog.bookings) == 0
    assert state.failures == 2


def test_nothing_is_known_of_a_new_process() -> None:
    state = a_state()
    state.take_page(page(1.0, running=4), now=1.0)
    state.use_adapter("x", most=2, now=1.0)
    booking = book(state, 5000, now=1.0)
    state.forget_server(now=2.0)
    assert state.metrics is None
    assert not state.loaded_adapters
    assert state.backlog.undone_tokens(now=2.0, rate=1000.0) == 0
    state.release(booking, computed=False, now=3.0)
    assert state.in_flight == 0


def test_time_that_runs_backwards_changes_nothing() -> None:
    backlog = Backlog(now=10.0)
    booked(backlog, 100, now=10.0)
    assert undone_at(backlog, now=9.0) == 100


def test_as_many_adapters_as_server_has_slots_are_remembered_by_last_use() -> None:
    state = a_state()
    for now, adapter in enumerate(["x", "y", "x", "z"]):
        state.use_adapter(adapter, most=2, now=float(now))
    assert state.loaded_adapters == {"x", "z"}
    assert not state.has_adapter("y")


def test_slots_and_active_adapters_on_the_servers_page_are_believed() -> None:
    state = a_state()
    metrics = EndpointMetrics(scraped_at=1.0, max_lora=3, active_adapters=frozenset({"w"}))
    state.take_page(metrics, now=1.0)
    for now, adapter in enumerate(["x", "y", "z"]):
        state.use_adapter(adapter, most=2, now=float(now))
    assert state.loaded_adapters == {"w", "x", "y", "z"}
    assert state.has_adapter("w")


def test_a_request_loads_its_adapter_if_the_server_does_not_hold_it() -> None:
    state = a_state()
    state.use_adapter("x", most=2, now=0.0)
    assert [state.expect_adapter(name) for name in ("x", "y", "y", "z")] == [False, True, False, True]


def test_an_adapter_that_is_only_asked_for_takes_no_slot_from_another() -> None:
    state = a_state()
    for name in ("x", "y"):
        state.use_adapter(name, most=2, now=0.0)
    for _ in range(2):
        state.expect_adapter("z")
    state.settle_adapter("z")
    assert state.loaded_adapters == {"x", "y", "z"}
    state.settle_adapter("z")
    assert state.loaded_adapters == {"x", "y"}
