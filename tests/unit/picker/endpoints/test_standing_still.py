"""Symptoms of a sick server: answers that begin and do not go on."""

from __future__ import annotations

import pytest

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.answers import Answers, Seen
from epp.picker.endpoints.endpoint_state import EndpointState
from tests.unit.picker.endpoints.bookings import a_state, book

HANG_S = 2.0


class WatchedServers:
    """Servers whose pages come once a second, each with the counter of generated tokens."""

    def __init__(self) -> None:
        self.answers = Answers()
        self._before: dict[EndpointState, EndpointMetrics] = {}

    def page(
        self,
        state: EndpointState,
        tokens: float | None,
        *,
        now: float,
        running: int = 1,
        at_end: bool = False,
    ) -> Seen:
        after = EndpointMetrics(
            scraped_at=now, generated_tokens=tokens, running=running, waiting=0, counts_at_end=at_end
        )
        before, self._before[state] = self._before.get(state), after
        return self._look(state, before, after, now=now)

    def unread(self, state: EndpointState, *, now: float) -> Seen:
        return self._look(state, self._before.get(state), None, now=now)

    def _look(
        self,
        state: EndpointState,
        before: EndpointMetrics | None,
        after: EndpointMetrics | None,
        *,
        now: float,
    ) -> Seen:
        seen = self.answers.look(state, before, after, hang_seconds=HANG_S, now=now)
        state.picks_since_scrape = 0
        return seen

    def begin(self, state: EndpointState, *, times: int, now: float) -> None:
        for _ in range(times):
            wait = self.answers.sent(state, model="m", streams=False, now=now)
            self.answers.began(wait, well=True, now=now)


def sent_to(state: EndpointState, tokens: int = 0) -> EndpointState:
    book(state, tokens, now=0.0)
    return state


def test_open_requests_with_counters_that_stand_still_are_a_stall() -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    assert [watched.page(state, 5.0, now=float(n)) for n in range(4)] == [
        "moves",  # nothing is known of the time before
        "idle",
        "stalls",  # 80 % of `hangSeconds` have passed since the first of these pages
        "stalls",
    ]
    assert watched.page(state, 6.0, now=4.0) == "moves"
    assert watched.page(state, 6.0, now=5.0) == "idle", "the time counts from the last growth"


def test_server_stalls_alone_if_counters_of_another_one_have_grown_since() -> None:
    watched, state, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    for n in range(2):
        watched.page(state, 5.0, now=float(n))
    watched.page(other, 5.0, now=1.5)
    assert watched.page(state, 5.0, now=2.0) == "stalls alone"


def test_a_server_has_twice_the_time_that_its_booked_work_should_take() -> None:
    watched, state = WatchedServers(), sent_to(a_state(), 3000)  # 3 s of work
    seen = [watched.page(state, 5.0, now=float(n)) for n in range(8)]
    assert seen.index("stalls") == 6, "0.8 * 2 s, and twice the 2 s that were left at the second page"


def test_a_server_without_open_requests_is_idle() -> None:
    watched, state = WatchedServers(), a_state()
    assert [watched.page(state, 5.0, now=float(n)) for n in range(6)] == ["moves"] + ["idle"] * 5


def test_a_server_that_waits_for_a_slow_client_does_not_stall() -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    for n, tokens in enumerate((0.0, 0.0, 9.0)):
        watched.page(state, tokens, now=float(n))
    for n in range(3, 9):
        assert watched.page(state, 9.0, now=float(n), running=0) == "idle"


@pytest.mark.parametrize(("tokens", "at_end"), [(None, False), (5.0, True)])
def test_server_that_does_not_count_while_it_generates_is_assumed_to_work(
    tokens: float | None, *, at_end: bool
) -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    assert {watched.page(state, tokens, now=float(n), at_end=at_end) for n in range(8)} == {"moves"}
    busy, other = sent_to(a_state()), sent_to(a_state())
    waits = [watched.answers.sent(busy, model="m", streams=False, now=8.0) for _ in range(2)]
    seen = [watched.page(busy, tokens, now=8.0 + n, at_end=at_end) for n in range(4)]
    watched.begin(other, times=3, now=11.5)
    seen += [watched.page(busy, tokens, now=12.0, at_end=at_end)]
    assert seen == ["moves"] * 4 + ["may hang"], (
        "others have begun three answers since the requests were sent"
    )
    watched.answers.began(waits[0], well=True, now=12.0)
    assert {watched.page(busy, tokens, now=12.0 + n, at_end=at_end) for n in range(8)} == {"moves"}
    assert watched.page(busy, 5.0, now=20.0) == "moves", "nothing is known of the counters before"


def test_whole_answers_that_take_long_everywhere_are_no_hang() -> None:
    watched, busy, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    for n in range(200):
        wait = watched.answers.sent(other, model="m", streams=False, now=float(n))
        watched.answers.began(wait, well=True, now=n + 5.0)
    for _ in range(2):
        watched.answers.sent(busy, model="m", streams=False, now=200.0)
    watched.begin(other, times=3, now=204.0)
    assert watched.page(busy, None, now=205.0) == "moves"


def test_an_old_request_that_is_not_streamed_makes_young_ones_no_hang() -> None:
    watched, state, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    watched.answers.sent(state, model="m", streams=False, now=0.0)
    watched.begin(other, times=3, now=1.0)
    for _ in range(2):
        watched.answers.sent(state, model="m", streams=True, now=29.99)
    assert watched.page(state, 5.0, now=30.0) == "moves"


def test_quick_errors_of_another_server_make_no_slow_first_byte_a_hang() -> None:
    watched, slow, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    for n in range(200):
        wait = watched.answers.sent(slow, model="m", streams=True, now=float(n))
        watched.answers.began(wait, well=True, now=n + 2.0)
    for _ in range(200):
        wait = watched.answers.sent(other, model="m", streams=True, now=300.0)
        watched.answers.began(wait, well=False, now=300.0)
    for _ in range(2):
        watched.answers.sent(slow, model="m", streams=True, now=300.0)
    watched.begin(other, times=3, now=301.0)
    assert watched.page(slow, 5.0, now=301.9) == "moves"


def test_a_stall_is_found_although_some_pages_cannot_be_read() -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    seen = [
        watched.unread(state, now=n / 2) if n % 2 else watched.page(state, 5.0, now=n / 2) for n in range(8)
    ]
    assert seen == ["moves", "idle", "idle", "idle", "stalls", "idle", "stalls", "idle"]


def test_two_streamed_answers_that_do_not_begin_are_a_hang() -> None:
    watched, state, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    waits = [watched.answers.sent(state, model="m", streams=True, now=0.0) for _ in range(2)]
    watched.begin(other, times=3, now=1.0)
    assert [watched.page(state, n, now=n) for n in (1.0, 2.0)] == ["moves", "hangs"], "counters may grow"
    watched.answers.left(waits[0])
    assert watched.page(state, 3.0, now=3.0) == "moves"
