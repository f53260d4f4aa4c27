"""Undone work at one server: examples of what each event does, and a state machine that compares with a
simple model.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.endpoints.pages import baseline, begun, confirm, settle
from epp.endpoints.state import Backlog, Booking

RATE = 100.0


def booked(backlog: Backlog, tokens: int, *, now: float) -> Booking:
    booking = Booking(tokens=tokens, booked_at=now)
    backlog.book(booking, now=now, rate=RATE)
    return booking


def undone(backlog: Backlog, *, now: float) -> float:
    backlog.check_integrity()
    return backlog.undone_tokens(now=now, rate=RATE)


def test_work_drains_at_the_servers_rate() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 400, now=0.0)
    booked(backlog, 1000, now=0.0)
    assert undone(backlog, now=1.0) == 1300
    assert undone(backlog, now=13.5) == 50
    assert undone(backlog, now=99.0) == 0


def test_of_a_prompt_that_a_page_does_not_count_a_quarter_is_undone_then_and_drains_from_there() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 400, now=0.0)
    booked(backlog, 1000, now=0.0)
    begun(backlog, 0, now=99.0, rate=RATE)
    assert undone(backlog, now=99.0) == 1100
    begun(backlog, 1, now=99.0, rate=RATE)
    assert undone(backlog, now=99.0) == 1000
    begun(backlog, 0, now=199.0, rate=RATE)
    assert undone(backlog, now=199.0) == 250
    assert undone(backlog, now=201.0) == 50
    assert undone(backlog, now=299.0) == 0
    begun(backlog, 1, now=299.0, rate=RATE)
    assert undone(backlog, now=299.0) == 0


@pytest.mark.parametrize("counts", [True, False])
def test_requests_of_unknown_size_do_not_pile_up(*, counts: bool) -> None:
    backlog = Backlog(now=0.0)
    for n in range(1_000):
        booked(backlog, 0, now=n * 0.1)
        if counts:
            confirm(backlog, 0.0, now=n * 0.1, rate=RATE)
        else:
            settle(backlog, now=n * 0.1, rate=RATE)
    backlog.check_integrity()
    assert len(backlog.bookings) == 0


def test_idle_time_drains_nothing_of_later_work() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 100, now=0.0)
    booked(backlog, 300, now=50.0)
    assert undone(backlog, now=50.0) == 300


def test_a_released_request_takes_its_own_work_along_and_no_more() -> None:
    backlog = Backlog(now=0.0)
    first = booked(backlog, 100, now=0.0)
    booked(backlog, 300, now=0.0)
    backlog.release(first, computed=True, now=0.5, rate=RATE)
    assert undone(backlog, now=0.5) == 300  # the server worked on the first request in this half second


def test_an_abort_of_the_last_in_line_leaves_the_estimate_for_the_first() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 300, now=0.0)
    last = booked(backlog, 500, now=0.0)
    backlog.release(last, computed=False, now=1.0, rate=RATE)
    assert undone(backlog, now=1.0) == 200


def test_release_is_idempotent() -> None:
    backlog = Backlog(now=0.0)
    first = booked(backlog, 100, now=0.0)
    booked(backlog, 100, now=0.0)
    for _ in range(3):
        backlog.release(first, computed=True, now=0.0, rate=RATE)
    assert undone(backlog, now=0.0) == 100
    assert len(backlog.bookings) == 1


def test_counters_replace_the_estimate_but_for_a_prompt_that_may_be_partly_done() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 100, now=0.0)
    booked(backlog, 200, now=0.0)
    booked(backlog, 400, now=0.0)
    # By the estimate 500 tokens are done, and the server counted 100. So of the rest only the 200 that are
    # next can be under way.
    confirm(backlog, 100, now=5.0, rate=RATE)
    assert undone(backlog, now=5.0) == 450


def test_a_server_slower_than_thought_gets_its_work_back() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 50, now=0.0)
    booked(backlog, 400, now=0.0)
    assert undone(backlog, now=4.0) == 50
    confirm(backlog, 0, now=4.0, rate=RATE)
    assert undone(backlog, now=4.0) == 412.5


def test_work_of_a_request_that_ended_between_scrapes_is_not_taken_from_others() -> None:
    backlog = Backlog(now=0.0)
    short = booked(backlog, 100, now=0.0)
    booked(backlog, 5000, now=0.0)
    backlog.release(short, computed=True, now=1.0, rate=RATE)
    confirm(backlog, 100, now=1.0, rate=RATE)  # the counters show the short request
    assert undone(backlog, now=1.0) == 5000
    confirm(backlog, 100, now=1.0, rate=RATE)  # the next growth belongs to another request
    assert undone(backlog, now=1.0) == 4900


def test_work_of_an_aborted_request_is_not_expected_in_the_counters() -> None:
    backlog = Backlog(now=0.0)
    aborted = booked(backlog, 100, now=0.0)
    booked(backlog, 5000, now=0.0)
    backlog.release(aborted, computed=False, now=0.0, rate=RATE)
    confirm(backlog, 100, now=0.0, rate=RATE)
    assert undone(backlog, now=0.0) == 4900


def test_each_first_token_ends_the_oldest_booking_whatever_it_held() -> None:
    backlog = Backlog(now=0.0)
    for tokens in (5000, 10, 300):
        booked(backlog, tokens, now=0.0)
    begun(backlog, 2, now=0.0, rate=RATE)
    assert undone(backlog, now=0.0) == 300


def test_after_first_tokens_only_the_prompt_in_turn_can_be_partly_done() -> None:
    backlog = Backlog(now=0.0)
    for tokens in (100, 200, 400):
        booked(backlog, tokens, now=0.0)
    # By the estimate 500 tokens are done, and the server began one answer. So of the rest only the 200
    # that are next can be under way.
    begun(backlog, 1, now=5.0, rate=RATE)
    assert undone(backlog, now=5.0) == 450


def test_the_first_token_of_a_request_that_ended_between_scrapes_ends_no_other_booking() -> None:
    backlog = Backlog(now=0.0)
    short = booked(backlog, 100, now=0.0)
    booked(backlog, 5000, now=0.0)
    backlog.release(short, computed=True, now=0.0, rate=RATE)
    begun(backlog, 1, now=0.0, rate=RATE)
    assert undone(backlog, now=0.0) == 5000


def test_a_page_older_than_an_end_leaves_its_first_token_to_the_next_page() -> None:
    backlog = Backlog(now=0.0)
    short = booked(backlog, 100, now=0.0)
    booked(backlog, 5000, now=0.0)
    backlog.release(short, computed=True, now=0.0, rate=RATE)
    begun(backlog, 0, now=0.0, rate=RATE)
    begun(backlog, 1, now=0.0, rate=RATE)
    assert undone(backlog, now=0.0) == 5000


def test_first_tokens_of_somebody_elses_requests_are_not_saved_up() -> None:
    backlog = Backlog(now=0.0)
    begun(backlog, 7, now=0.0, rate=RATE)
    booked(backlog, 300, now=0.0)
    begun(backlog, 0, now=0.0, rate=RATE)
    assert undone(backlog, now=0.0) == 300


def test_first_tokens_are_compared_with_what_waited_before_them_if_all_of_the_requests_are_known() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 100, now=0.0)
    booked(backlog, 300, now=0.5)  # 50 of the 100 are computed by then
    assert begun(backlog, 2, now=4.0, rate=RATE) == (400, 100 + 350)
    booked(backlog, 100, now=5.0)
    assert begun(backlog, 2, now=6.0, rate=RATE) is None, "one of them is somebody else's"
    backlog.release(booked(backlog, 100, now=7.0), computed=True, now=7.0, rate=RATE)
    assert begun(backlog, 1, now=8.0, rate=RATE) is None, "it ended before the page was read"
    backlog.book(Booking(tokens=100, booked_at=9.0, loads=True), now=9.0, rate=RATE)
    assert begun(backlog, 1, now=10.0, rate=RATE) is None, "it waited for an adapter"


def test_the_first_counters_already_hold_what_was_released_before() -> None:
    backlog = Backlog(now=0.0)
    backlog.release(booked(backlog, 100, now=0.0), computed=True, now=0.0, rate=RATE)
    booked(backlog, 500, now=0.0)
    baseline(backlog)
    confirm(backlog, 100, now=0.0, rate=RATE)
    assert undone(backlog, now=0.0) == 400


def test_without_counters_the_estimate_is_believed() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 100, now=0.0)
    booked(backlog, 100, now=0.0)
    settle(backlog, now=1.5, rate=RATE)
    assert len(backlog.bookings) == 1
    assert undone(backlog, now=1.5) == 50


def test_what_is_known_done_goes_with_the_estimate_made_against_it() -> None:
    backlog = Backlog(now=0.0)
    booked(backlog, 100, now=0.0)
    booked(backlog, 400, now=0.5)
    # the estimate had 80 tokens of the first done, and none of the second
    backlog.clear_before(0.5, now=0.8, rate=RATE)
    assert undone(backlog, now=0.8) == 400


def test_time_that_runs_backwards_changes_nothing() -> None:
    backlog = Backlog(now=10.0)
    booked(backlog, 100, now=10.0)
    assert undone(backlog, now=9.0) == 100


class AgainstNaiveModel(RuleBasedStateMachine):
    """The model keeps a plain list and computes everything again each time. Tokens are whole, so both
    agree except for rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.backlog = Backlog(now=0.0)
        self.pairs: list[tuple[Booking, list[int]]] = []  # live ones: booking, [model's tokens]
        self.over: list[Booking] = []
        self.drained = 0.0
        self.uncounted = 0
        self.unbegun = 0

    def total(self) -> int:
        return sum(cell[0] for _, cell in self.pairs)

    def model_take(self, tokens: int) -> None:
        """Take tokens off the oldest bookings. A booking without tokens goes as soon as it is the oldest."""
        for pair in list(self.pairs):
            if pair[1][0] > tokens:
                pair[1][0] -= tokens
                return
            tokens -= pair[1][0]
            pair[1][0] = 0
            self.pairs.remove(pair)
            self.over.append(pair[0])

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.drained = min(self.total(), self.drained + RATE * seconds)

    @rule(tokens=st.integers(0, 400))
    def book(self, tokens: int) -> None:
        booking = Booking(tokens=tokens, booked_at=self.now)
        before = self.backlog.undone_tokens(now=self.now, rate=RATE)
        self.backlog.book(booking, now=self.now, rate=RATE)
        after = self.backlog.undone_tokens(now=self.now, rate=RATE)
        assert before - 1e-6 <= after <= before + tokens + 1e-6
        self.pairs.append((booking, [tokens]))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), computed=st.booleans())
    def release(self, data: st.DataObject, *, computed: bool) -> None:
        index = data.draw(st.integers(0, len(self.pairs) - 1))
        booking, cell = self.pairs.pop(index)
        self.over.append(booking)
        self.backlog.release(booking, computed=computed, now=self.now, rate=RATE)
        self.uncounted += cell[0] if computed else 0
        self.unbegun += computed
        if index == 0:
            self.drained = max(0.0, self.drained - cell[0])
        self.drained = min(self.drained, self.total())

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        booking = data.draw(st.sampled_from(self.over))
        self.backlog.release(booking, computed=True, now=self.now, rate=RATE)

    @rule(tokens=st.integers(0, 800))
    def confirm(self, tokens: int) -> None:
        confirm(self.backlog, float(tokens), now=self.now, rate=RATE)
        tokens = max(0, tokens - self.uncounted)
        self.uncounted = self.unbegun = 0
        self.drained = max(0.0, self.drained - tokens)
        self.model_take(tokens)
        self.drained = min(self.drained, self.pairs[0][1][0] * 3 / 4 if self.pairs else 0)

    @rule(requests=st.integers(0, 6))
    def begun(self, requests: int) -> None:
        begun(self.backlog, requests, now=self.now, rate=RATE)
        for _ in range(requests):
            if self.unbegun:
                self.unbegun -= 1
            elif self.pairs:
                booking, cell = self.pairs.pop(0)
                self.over.append(booking)
                self.drained = max(0.0, self.drained - cell[0])
        self.uncounted = 0
        self.drained = min(self.drained, self.pairs[0][1][0] * 3 / 4 if self.pairs else 0)

    @rule()
    def settle(self) -> None:
        settle(self.backlog, now=self.now, rate=RATE)
        self.uncounted = self.unbegun = 0
        # The model rounds to whole tokens as the product does. Otherwise a rounding difference would look
        # like a fault.
        taken = self.total() - sum(b.tokens for b, _ in self.pairs)
        assert abs(taken - self.drained) < 1.001
        self.model_take(taken)
        self.drained = 0.0

    @rule(ago=st.floats(0, 5))
    def clear_before(self, ago: float) -> None:
        when = self.now - ago
        self.backlog.clear_before(when, now=self.now, rate=RATE)
        while self.pairs and self.pairs[0][0].booked_at < when:
            booking, cell = self.pairs.pop(0)
            self.over.append(booking)
            self.drained = max(0.0, self.drained - cell[0])
        self.drained = min(self.drained, self.total())

    @invariant()
    def agrees(self) -> None:
        self.backlog.check_integrity()
        expected = self.total() - self.drained
        assert self.backlog.undone_tokens(now=self.now, rate=RATE) == pytest.approx(expected, abs=1e-6)
        assert sum(b.tokens for b, _ in self.pairs) == self.total()
        assert all(b.tokens == 0 for b in self.over)


TestBacklogAgainstNaiveModel = AgainstNaiveModel.TestCase
