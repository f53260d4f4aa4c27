"""The state of one endpoint: its load, undone work, rate and adapters, from pages and requests."""

import pytest

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.picker.endpoints.backlog import Backlog, Booking
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate
from tests.unit.picker.endpoints.bookings import RATE, a_state, book, booked, page


def test_without_metrics_the_load_is_the_number_of_our_open_requests() -> None:
    state = a_state()
    first = book(state, 10, now=0.0)
    book(state, 10, now=0.0)
    assert state.loads[0] == 2
    state.release(first, computed=True, now=1.0)
    assert state.loads[0] == 1


@pytest.mark.parametrize("counts", [{}, {"running": 40}, {"waiting": 40}])
def test_with_a_page_without_a_gauge_the_load_is_our_open_requests(counts: dict[str, int]) -> None:
    state = a_state()
    state.take_page(EndpointMetrics(scraped_at=1.0, **counts), now=1.0)  # type: ignore[arg-type]  # gauges alone
    book(state, 10, now=1.0)
    assert state.loads[0] == 1


def test_load_is_the_scraped_number_plus_our_picks_minus_our_ends_since() -> None:
    state = a_state()
    first = book(state, 10, now=0.0)
    state.take_page(page(1.0, running=5, waiting=2), now=1.0)
    assert state.loads[0] == 7
    book(state, 10, now=1.1)
    book(state, 10, now=1.2)
    state.release(first, computed=True, now=1.3)
    assert state.loads[0] == 8


def test_only_scrapes_count_a_request_after_it_was_let_go() -> None:
    state = a_state()
    state.take_page(page(0.0), now=0.0)
    book(state, 10, now=0.1)
    state.detach()
    assert state.in_flight == 0
    assert state.loads[0] == 1  # picked since the scrape
    state.take_page(page(1.0, running=1), now=1.0)
    assert state.loads[0] == 1
    state.take_page(page(2.0, running=0), now=2.0)
    assert state.loads[0] == 0


def test_a_first_page_proves_no_prompt_that_is_being_computed() -> None:
    state = a_state()
    book(state, 300_000, now=0.0)
    for n in range(1, 4):
        state.take_page(page(float(n), running=1, begun=0, finished=0), now=float(n))
    assert len(state.backlog.bookings) == 1
    state.take_page(page(4.0, running=1, begun=1, finished=0), now=4.0)
    assert len(state.backlog.bookings) == 0


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
    state.scrape_failed(now=1.5)
    state.forget_server(now=2.0)
    assert (state.metrics, state.failures) == (None, 0)
    assert not state.loaded_adapters
    assert state.backlog.undone_tokens(now=2.0, rate=1000.0) == 0
    state.release(booking, computed=False, now=3.0)
    assert state.in_flight == 0


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


def test_first_tokens_are_compared_only_if_all_requests_are_known() -> None:
    backlog = Backlog()
    booked(backlog, 100, now=0.0)
    booked(backlog, 300, now=0.5)  # 50 of the 100 are computed by then
    assert backlog.begun(2, now=4.0, rate=RATE) == (400, 100 + 350)
    booked(backlog, 100, now=5.0)
    assert backlog.begun(2, now=6.0, rate=RATE) is None, "the picker does not know one of the requests"
    backlog.release(booked(backlog, 100, now=7.0), computed=True, now=7.0, rate=RATE)
    assert backlog.begun(1, now=8.0, rate=RATE) is None, "the request ended before the page was read"
    backlog.book(Booking(tokens=100, booked_at=9.0, loads=True), now=9.0, rate=RATE)
    assert backlog.begun(1, now=10.0, rate=RATE) is None, "the request waited for an adapter"


def test_a_lost_request_takes_no_more_from_others_than_they_waited_for() -> None:
    backlog = Backlog()
    lost = booked(backlog, 500, now=0.0)
    booked(backlog, 500, now=10.0)  # the first seems to be done
    backlog.release(lost, computed=False, now=11.0, rate=RATE)
    assert backlog.begun(1, now=12.0, rate=RATE) == (500, 500.0)


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
        state.take_page(page(n, running=60, prompt_tokens=counted, cached=0.0, begun=n - 1), now=n)
        if n == 2:
            assert (state.tokens_per_s < 1000) == (booked_at < 1)
    assert state.tokens_per_s == pytest.approx(550, rel=0.1)


def test_a_server_with_an_adapter_to_load_does_not_look_slow() -> None:
    state = a_state()
    state.book(Booking(tokens=500, booked_at=0.5, loads=True), now=0.5)
    for n in range(1, 31):
        state.take_page(page(n, running=2, prompt_tokens=100.0 * n, cached=0.0, begun=0), now=n)
    assert state.tokens_per_s == 1000


def test_a_first_token_ends_a_booking_however_many_tokens_were_expected() -> None:
    state = a_state()
    state.take_page(page(0.0, prompt_tokens=0.0, begun=0), now=0.0)
    book(state, 4000, now=0.0)
    book(state, 5000, now=0.0)
    # All but 100 tokens of the first prompt were cached, which nobody expected.
    state.take_page(page(0.1, running=2, prompt_tokens=100.0, begun=1), now=0.1)
    assert state.backlog.undone_tokens(now=0.1, rate=1000.0) == 5000
    assert len(state.backlog.bookings) == 1


def test_a_page_that_stands_still_does_not_show_that_a_new_request_began() -> None:
    """vLLM's page is as of the end of its last step. Here the first step takes three seconds."""
    state = a_state()
    state.take_page(page(0.0, begun=4, finished=4, ttft_sum_s=1.0), now=0.0)
    book(state, 600, now=0.1)
    for n in range(1, 4):
        state.take_page(page(n, begun=4, finished=4, ttft_sum_s=1.0), now=n)
    assert len(state.backlog.bookings) == 1
    state.take_page(page(4.0, running=1, begun=5, finished=4, ttft_sum_s=4.0), now=4.0)
    assert len(state.backlog.bookings) == 0
    assert state.tokens_per_s < 350


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


def test_computed_tokens_a_second_end_two_minutes_after_the_work() -> None:
    """The server computes for a minute, and once more a single token after some time."""
    state = a_state()
    shown = []
    for second in range(400):
        tokens = 1000.0 * min(second, 60) + 4 * (second >= 220)
        state.take_page(page(second, prompt_tokens=tokens, cached=tokens / 4), now=second)
        shown.append(state.computed_per_s)
    assert shown[60] == pytest.approx(750, rel=0.15)
    assert 0 < shown[119] < 750 * 0.2
    assert [second for second in range(1, 400) if not shown[second]] == [*range(181, 220), *range(341, 400)]
    state.take_page(page(400.0, prompt_tokens=1e6), now=400.0)
    assert state.computed_per_s
    state.forget_server(now=401.0)
    assert state.computed_per_s == 0.0


def test_a_server_with_later_first_tokens_is_slower_at_once() -> None:
    model = ModelRate(start=8000.0)
    endpoints = [Endpoint(EndpointName(n), Address("10.0.0.1", 8000 + i)) for i, n in enumerate("abc")]
    slow, *others = (EndpointState(endpoint, PrefillRate(model)) for endpoint in endpoints)
    sums = dict.fromkeys((slow, *others), 0.0)
    for at in range(25):
        for state in sums:
            sums[state] += 1.0 if state is slow else 0.5
            seen = EndpointMetrics(scraped_at=float(at), ttft_count=float(at), ttft_sum_s=sums[state])
            state.take_page(seen, now=float(at))
            book(state, 4000, now=float(at))
    assert slow.tokens_per_s < 0.7 * others[0].tokens_per_s
    assert others[0].tokens_per_s == pytest.approx(others[1].tokens_per_s, rel=0.05)
