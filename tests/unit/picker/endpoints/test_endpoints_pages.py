"""What a server's metrics page says about its undone work, its rate and its adapters."""

from __future__ import annotations

import pytest

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.picker.endpoints.backlog import Backlog, Booking
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.prefill_rate import ModelRate
from tests.unit.picker.endpoints.bookings import RATE, a_state, book, booked, page


def test_first_tokens_are_compared_only_if_all_requests_are_known() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 100, now=0.0)
    booked(backlog, 300, now=0.5)  # 50 of the 100 are computed by then
    assert backlog.begun(2, now=4.0, rate=RATE) == (400, 100 + 350)
    booked(backlog, 100, now=5.0)
    assert backlog.begun(2, now=6.0, rate=RATE) is None, "the picker does not know one of the requests"
    backlog.release(booked(backlog, 100, now=7.0), computed=True, now=7.0, rate=RATE)
    assert backlog.begun(1, now=8.0, rate=RATE) is None, "the request ended before the page was read"
    backlog.book(Booking(tokens=100, booked_at=9.0, loads=True), now=9.0, rate=RATE)
    assert backlog.begun(1, now=10.0, rate=RATE) is None, "the request waited for an adapter"


def test_idle_server_has_done_all_bookings_from_before_the_previous_page() -> None:
    state = a_state()
    book(state, 5000, now=0.5)
    state.take_page(page(1.0, running=1, prompt_tokens=0.0), now=1.0)
    book(state, 700, now=1.5)
    state.take_page(page(2.0, prompt_tokens=0.0), now=2.0)
    # the second request may still be on its way
    assert state.backlog.undone_tokens(now=1.5, rate=1000.0) <= 700
    assert len(state.backlog.bookings) == 1


@pytest.mark.parametrize("booked_at", [0.5, 1.5], ids=["busy all the time", "idle at first"])
def test_a_server_that_had_work_all_the_time_teaches_how_fast_it_is(booked_at: float) -> None:
    """The server computes 500 tokens a second, where the policy says 1,000."""
    state = a_state()
    for _ in range(60):
        book(state, 500, now=booked_at)
    for n in range(1, 31):
        counted = 500.0 * (n - 1)
        metrics = EndpointMetrics(
            scraped_at=float(n),
            running=60,
            prompt_tokens=counted,
            cached_prompt_tokens=0.0,
            ttft_count=n - 1.0,
        )
        state.take_page(metrics, now=float(n))
        if n == 2:
            assert (state.tokens_per_s < 1000) == (booked_at < 1)
    assert state.tokens_per_s == pytest.approx(550, rel=0.1)


def test_a_first_token_ends_a_booking_however_many_tokens_were_expected() -> None:
    state = a_state()
    state.take_page(page(0.0, prompt_tokens=0.0, begun=0), now=0.0)
    book(state, 4000, now=0.0)
    book(state, 5000, now=0.0)
    # All but 100 tokens of the first prompt were cached, which nobody expected.
    state.take_page(page(0.1, running=2, prompt_tokens=100.0, begun=1), now=0.1)
    assert state.backlog.undone_tokens(now=0.1, rate=1000.0) == 5000
    assert len(state.backlog.bookings) == 1


def test_a_server_that_only_decodes_has_no_prompts_left() -> None:
    """Bookings from before the first page end there, because no later growth can show their first tokens."""
    state = a_state()
    book(state, 4000, now=0.0)
    state.take_page(page(1.0, running=1, begun=51, finished=50), now=1.0)
    book(state, 900, now=1.5)
    state.take_page(page(2.0, running=2, begun=51, finished=50), now=2.0)
    # One of the two requests has no first token yet, and nobody can tell which.
    assert len(state.backlog.bookings) == 2
    book(state, 700, now=2.5)
    state.take_page(page(3.0, running=2, begun=52, finished=50), now=3.0)
    assert len(state.backlog.bookings) == 1
    assert state.backlog.undone_tokens(now=2.5, rate=1000.0) <= 700


def test_requests_without_a_first_token_do_not_look_busy_for_good() -> None:
    state = a_state()
    state.take_page(page(1.0, running=2, begun=10, finished=8), now=1.0)
    # the server is idle, since three requests were aborted in their prefill
    state.take_page(page(2.0, begun=10, finished=13), now=2.0)
    book(state, 4000, now=2.5)
    state.take_page(page(3.0, running=1, begun=10, finished=13), now=3.0)
    state.take_page(page(4.0, running=1, begun=10, finished=13), now=4.0)
    assert len(state.backlog.bookings) == 1
    state.take_page(page(5.0, running=1, begun=11, finished=13), now=5.0)
    assert len(state.backlog.bookings) == 0


def test_a_page_that_names_the_loaded_adapters_removes_idle_ones() -> None:
    state = a_state()
    for now, adapter in enumerate(["x", "y", "z"]):
        state.use_adapter(adapter, most=4, now=float(now))
    state.take_page(EndpointMetrics(scraped_at=1.5, loaded_adapters=frozenset({"x"})), now=1.5)
    assert state.loaded_adapters == {"x", "y", "z"}  # the first page may be older than the picks
    later = EndpointMetrics(
        scraped_at=2.5, loaded_adapters=frozenset({"w"}), active_adapters=frozenset({"x"})
    )
    state.take_page(later, now=2.5)
    # A request for x waits there, and z was sent there after the previous page. The server dropped y and
    # loaded w for an unknown request.
    assert state.loaded_adapters == {"w", "x", "z"}
    # another process has started and does not report it
    state.take_page(EndpointMetrics(scraped_at=3.5), now=3.5)
    assert state.loaded_adapters == {"x", "z"}


def test_computed_tokens_a_second_cover_the_last_minute() -> None:
    state = a_state()
    for second in range(120):
        tokens = 1000.0 * min(second, 60)
        page_now = EndpointMetrics(
            scraped_at=float(second), prompt_tokens=tokens, cached_prompt_tokens=tokens / 4
        )
        state.take_page(page_now, now=float(second))
        if second == 60:
            assert state.computed_per_s == pytest.approx(750, rel=0.15)
    assert 0 < state.computed_per_s < 750 * 0.2
    state.forget_server(now=120.0)
    assert state.computed_per_s == 0.0


def test_a_server_with_later_first_tokens_is_slower_at_once() -> None:
    model = ModelRate(start=8000.0)
    endpoints = [Endpoint(EndpointName(n), Address("10.0.0.1", 8000 + i)) for i, n in enumerate("abc")]
    slow, *others = (EndpointState.new(endpoint, model_rate=model, now=0.0) for endpoint in endpoints)
    sums = dict.fromkeys((slow, *others), 0.0)
    for at in range(25):
        for state in sums:
            sums[state] += 1.0 if state is slow else 0.5
            seen = EndpointMetrics(scraped_at=float(at), ttft_count=float(at), ttft_sum_s=sums[state])
            state.take_page(seen, now=float(at))
            book(state, 4000, now=float(at))
    assert slow.tokens_per_s < 0.7 * others[0].tokens_per_s
    assert others[0].tokens_per_s == pytest.approx(others[1].tokens_per_s, rel=0.05)
