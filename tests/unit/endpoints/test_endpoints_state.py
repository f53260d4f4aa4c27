"""The load of one endpoint, computed from scrapes, from requests that we sent, and from requests that
ended.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.policy import PolicySpec
from epp.config.routing import Lora
from epp.endpoints import pages
from epp.endpoints.adapters import has_adapter, loaded_adapters, slots, use_adapter
from epp.endpoints.prefill_rate import ModelRate
from epp.endpoints.state import Booking, EndpointState
from epp.types import Address, Endpoint, EndpointMetrics, EndpointName

SPEC = PolicySpec(lora=Lora(slots_per_endpoint=2))


def a_state(*, now: float = 0.0) -> EndpointState:
    endpoint = Endpoint(name=EndpointName("a"), address=Address("10.0.0.1", 8000))
    return EndpointState.new(endpoint, model_rate=ModelRate(start=1000.0), now=now)


def book(state: EndpointState, tokens: int, *, now: float) -> Booking:
    booking = Booking(tokens=tokens, booked_at=now)
    state.book(booking, now=now)
    return booking


def page(
    at: float,
    *,
    running: int = 0,
    waiting: int = 0,
    prompt_tokens: float | None = None,
    begun: float | None = None,
    finished: float | None = None,
) -> EndpointMetrics:
    return EndpointMetrics(
        scraped_at=at,
        running=running,
        waiting=waiting,
        prompt_tokens=prompt_tokens,
        ttft_count=begun,
        finished=finished,
    )


def test_without_metrics_load_is_what_we_have_in_flight() -> None:
    state = a_state()
    first = book(state, 10, now=0.0)
    book(state, 10, now=0.0)
    assert state.load(None) == 2
    state.release(first, computed=True, now=1.0)
    assert state.load(None) == 1


@pytest.mark.parametrize("said", [{}, {"running": 40}, {"waiting": 40}])
def test_a_page_that_does_not_say_how_many_are_inside_leaves_the_load_to_what_we_have_in_flight(
    said: dict[str, int],
) -> None:
    state = a_state()
    pages.take_in(state, EndpointMetrics(scraped_at=1.0, **said), now=1.0)  # type: ignore[arg-type]  # gauges alone
    book(state, 10, now=1.0)
    assert state.load(state.metrics) == 1


def test_load_is_scraped_plus_own_picks_less_own_ends_since() -> None:
    state = a_state()
    first = book(state, 10, now=0.0)
    pages.take_in(state, page(1.0, running=5, waiting=2), now=1.0)
    assert state.load(state.metrics) == 7
    book(state, 10, now=1.1)
    book(state, 10, now=1.2)
    state.release(first, computed=True, now=1.3)
    assert state.load(state.metrics) == 8


def test_load_is_never_under_our_own_in_flight() -> None:
    """No scrape has a request that was on its way while the page was written, but the request is there."""
    state = a_state()
    for _ in range(3):
        book(state, 10, now=0.99)
    pages.take_in(state, page(1.0, running=0), now=1.0)
    assert state.load(state.metrics) == 3


def test_a_request_let_go_is_counted_by_the_scrapes_from_then_on() -> None:
    state = a_state()
    pages.take_in(state, page(0.0), now=0.0)
    book(state, 10, now=0.1)
    state.detach()
    assert state.in_flight == 0
    assert state.load(state.metrics) == 1  # picked since the scrape
    pages.take_in(state, page(1.0, running=1), now=1.0)
    assert state.load(state.metrics) == 1
    pages.take_in(state, page(2.0, running=0), now=2.0)
    assert state.load(state.metrics) == 0


def test_a_request_that_moved_away_leaves_no_load_behind() -> None:
    first, second = a_state(), a_state()
    for state in (first, second):
        pages.take_in(state, page(0.0), now=0.0)
    booking = book(first, 500, now=0.1)
    first.release(booking, computed=False, now=0.2)
    moved = book(second, 500, now=0.2)
    assert (first.load(first.metrics), second.load(second.metrics)) == (0, 1)
    assert first.backlog.undone_tokens(now=0.2, rate=1000.0) == 0
    second.release(moved, computed=True, now=0.3)
    assert second.load(second.metrics) == 0


def test_metrics_are_fresh_up_to_their_age_limit_and_unknown_beyond() -> None:
    state = a_state()
    assert state.fresh(now=0.0, stale_after_s=5.0) is None
    pages.take_in(state, page(10.0, running=1), now=10.0)
    assert state.fresh(now=15.0, stale_after_s=5.0) is state.metrics
    assert state.fresh(now=15.1, stale_after_s=5.0) is None


def test_an_idle_server_has_done_all_that_the_page_before_could_have_seen() -> None:
    state = a_state()
    book(state, 5000, now=0.5)
    pages.take_in(state, page(1.0, running=1, prompt_tokens=0.0), now=1.0)
    book(state, 700, now=1.5)
    pages.take_in(state, page(2.0, prompt_tokens=0.0), now=2.0)
    # the second request may still be on its way
    assert state.backlog.undone_tokens(now=1.5, rate=1000.0) <= 700
    assert len(state.backlog.bookings) == 1


def test_work_counted_by_the_server_leaves_the_backlog() -> None:
    state = a_state()
    pages.take_in(state, page(0.0, prompt_tokens=0.0), now=0.0)
    book(state, 300, now=0.0)
    book(state, 5000, now=0.0)
    pages.take_in(state, page(0.1, running=2, prompt_tokens=300.0), now=0.1)
    assert state.backlog.undone_tokens(now=0.1, rate=1000.0) == 5000
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
        pages.take_in(state, metrics, now=float(n))
        if n == 2:
            assert (state.tokens_per_s < 1000) == (booked_at < 1)
    assert state.tokens_per_s == pytest.approx(550, rel=0.1)


def test_a_first_token_ends_a_booking_whatever_the_prompt_was_thought_to_hold() -> None:
    state = a_state()
    pages.take_in(state, page(0.0, prompt_tokens=0.0, begun=0), now=0.0)
    book(state, 4000, now=0.0)
    book(state, 5000, now=0.0)
    # All but 100 tokens of the first prompt were cached, which nobody expected.
    pages.take_in(state, page(0.1, running=2, prompt_tokens=100.0, begun=1), now=0.1)
    assert state.backlog.undone_tokens(now=0.1, rate=1000.0) == 5000
    assert len(state.backlog.bookings) == 1


def test_a_server_that_only_decodes_has_no_work_left_of_before() -> None:
    """Bookings from before the first page end there, because no later growth can show their first tokens."""
    state = a_state()
    book(state, 4000, now=0.0)
    pages.take_in(state, page(1.0, running=1, begun=51, finished=50), now=1.0)
    book(state, 900, now=1.5)
    pages.take_in(state, page(2.0, running=2, begun=51, finished=50), now=2.0)
    # One of the two requests has no first token yet, and nobody can tell which.
    assert len(state.backlog.bookings) == 2
    book(state, 700, now=2.5)
    pages.take_in(state, page(3.0, running=2, begun=52, finished=50), now=3.0)
    assert len(state.backlog.bookings) == 1
    assert state.backlog.undone_tokens(now=2.5, rate=1000.0) <= 700


def test_requests_that_ended_without_a_first_token_do_not_make_a_server_look_busy_for_good() -> None:
    state = a_state()
    pages.take_in(state, page(1.0, running=2, begun=10, finished=8), now=1.0)
    # the server is idle, since three requests were aborted in their prefill
    pages.take_in(state, page(2.0, begun=10, finished=13), now=2.0)
    book(state, 4000, now=2.5)
    pages.take_in(state, page(3.0, running=1, begun=10, finished=13), now=3.0)
    pages.take_in(state, page(4.0, running=1, begun=10, finished=13), now=4.0)
    assert len(state.backlog.bookings) == 1
    pages.take_in(state, page(5.0, running=1, begun=11, finished=13), now=5.0)
    assert len(state.backlog.bookings) == 0


def test_lost_bookings_are_dropped_after_ten_minutes_also_while_scrapes_fail() -> None:
    state = a_state()
    book(state, 100, now=0.0)
    state.detach()
    state.scrape_failed(now=599.0)
    assert len(state.backlog.bookings) == 1
    state.scrape_failed(now=601.0)
    assert len(state.backlog.bookings) == 0
    assert state.failures == 2


def test_a_good_scrape_ends_a_row_of_failures() -> None:
    state = a_state()
    state.scrape_failed(now=1.0)
    state.scrape_failed(now=2.0)
    pages.take_in(state, page(3.0), now=3.0)
    assert state.failures == 0


def test_adapters_are_remembered_by_last_use_within_the_servers_slots() -> None:
    state = a_state()
    for now, adapter in enumerate(["x", "y", "x", "z"]):
        use_adapter(state, adapter, spec=SPEC, now=float(now))
    assert loaded_adapters(state) == {"x", "z"}
    assert not has_adapter(state, "y")


def test_a_server_that_names_its_loaded_adapters_is_believed_about_idle_ones() -> None:
    state = a_state()
    for now, adapter in enumerate(["x", "y", "z"]):
        use_adapter(state, adapter, spec=PolicySpec(), now=float(now))
    pages.take_in(state, EndpointMetrics(scraped_at=1.5, loaded_adapters=frozenset({"x"})), now=1.5)
    assert loaded_adapters(state) == {"x", "y", "z"}  # the first page may be older than the picks
    later = EndpointMetrics(
        scraped_at=2.5, loaded_adapters=frozenset({"w"}), active_adapters=frozenset({"x"})
    )
    pages.take_in(state, later, now=2.5)
    # x waits there, and z was sent there after the page before. y was dropped, and w came from somebody
    # else.
    assert loaded_adapters(state) == {"w", "x", "z"}
    # another process has started and does not report it
    pages.take_in(state, EndpointMetrics(scraped_at=3.5), now=3.5)
    assert loaded_adapters(state) == {"x", "z"}


def test_the_servers_own_word_on_slots_and_active_adapters_counts() -> None:
    state = a_state()
    metrics = EndpointMetrics(scraped_at=1.0, max_lora=3, active_adapters=frozenset({"w"}))
    pages.take_in(state, metrics, now=1.0)
    for now, adapter in enumerate(["x", "y", "z"]):
        use_adapter(state, adapter, spec=SPEC, now=float(now))
    assert slots(state, spec=SPEC) == 3
    assert loaded_adapters(state) == {"w", "x", "y", "z"}
    assert has_adapter(state, "w")


def test_a_new_process_is_known_nothing_of() -> None:
    state = a_state()
    pages.take_in(state, page(1.0, running=4), now=1.0)
    use_adapter(state, "x", spec=SPEC, now=1.0)
    booking = book(state, 5000, now=1.0)
    state.forget_server(now=2.0)
    assert state.metrics is None
    assert not loaded_adapters(state)
    assert state.backlog.undone_tokens(now=2.0, rate=1000.0) == 0
    state.release(booking, computed=False, now=3.0)
    assert state.in_flight == 0


EVENTS = st.sampled_from(["book", "end", "detach", "scrape", "fail"])


@given(st.lists(st.tuples(EVENTS, st.integers(0, 20)), max_size=60))
def test_load_is_never_under_what_we_hold_there_and_all_is_released_in_the_end(
    events: list[tuple[str, int]],
) -> None:
    state, held, now = a_state(), list[Booking](), 0.0
    for event, number in events:
        now += 0.3
        if event == "book":
            held.append(book(state, number * 100, now=now))
        elif event == "end" and held:
            state.release(held.pop(number % len(held)), computed=number % 2 == 0, now=now)
        elif event == "detach" and held:
            held.pop(number % len(held))
            state.detach()
        elif event == "scrape":
            pages.take_in(state, page(now, running=number, prompt_tokens=now * number), now=now)
        elif event == "fail":
            state.scrape_failed(now=now)
        state.backlog.check_integrity()
        assert state.in_flight == len(held)
        assert state.load(state.metrics) >= len(held)
    for booking in held:
        state.release(booking, computed=True, now=now)
    assert state.in_flight == 0


def test_an_adapter_is_loaded_for_the_first_request_of_those_that_keep_it() -> None:
    state = a_state()
    used = [use_adapter(state, name, spec=SPEC, now=0.0) for name in ("x", "x", "y", "z", "x")]
    assert used == [True, False, True, True, True]


def test_a_load_counts_once_between_the_pages_where_its_request_ended() -> None:
    state = a_state()
    loading, other, aborted = (book(state, 10, now=0.0) for _ in range(3))
    loading.loads = aborted.loads = True
    pages.take_in(state, page(1.0, running=3), now=1.0)
    assert state.ended_loads == 0
    state.release(loading, computed=True, now=1.5)
    state.release(other, computed=True, now=1.5)
    state.release(aborted, computed=False, now=1.5)
    assert state.ended_loads == 1
    pages.take_in(state, page(2.0), now=2.0)
    assert state.ended_loads == 0


def test_tokens_computed_a_second_are_those_of_the_last_minute_without_hits_and_start_anew_with_the_process() -> (
    None
):
    state = a_state()
    for second in range(120):
        tokens = 1000.0 * min(second, 60)
        page_now = EndpointMetrics(
            scraped_at=float(second), prompt_tokens=tokens, cached_prompt_tokens=tokens / 4
        )
        pages.take_in(state, page_now, now=float(second))
        if second == 60:
            assert state.computed_per_s == pytest.approx(750, rel=0.15)
    assert 0 < state.computed_per_s < 750 * 0.2
    state.forget_server(now=120.0)
    assert state.computed_per_s == 0.0


def test_a_server_whose_first_tokens_take_longer_than_those_of_its_peers_is_slower_before_an_answer_ends() -> (
    None
):
    model = ModelRate(start=8000.0)
    endpoints = [Endpoint(EndpointName(n), Address("10.0.0.1", 8000 + i)) for i, n in enumerate("abc")]
    slow, *others = (EndpointState.new(endpoint, model_rate=model, now=0.0) for endpoint in endpoints)
    sums = dict.fromkeys((slow, *others), 0.0)
    for at in range(25):
        for state in sums:
            sums[state] += 1.0 if state is slow else 0.5
            seen = EndpointMetrics(scraped_at=float(at), ttft_count=float(at), ttft_sum_s=sums[state])
            pages.take_in(state, seen, now=float(at))
            book(state, 4000, now=float(at))
    assert slow.tokens_per_s < 0.7 * others[0].tokens_per_s
    assert others[0].tokens_per_s == pytest.approx(others[1].tokens_per_s, rel=0.05)
