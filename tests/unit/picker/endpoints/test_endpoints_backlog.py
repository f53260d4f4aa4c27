"""The backlog of one server against a simple model, by a state machine: what bookings and pages do to it."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.picker.endpoints.backlog import Backlog, Booking
from tests.invariants.fleet import check_backlog
from tests.unit.picker.endpoints.bookings import RATE


class AgainstNaiveModel(RuleBasedStateMachine):
    """The model keeps a plain list and computes everything again each time. Tokens are whole, so both
    agree except for rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.backlog = Backlog()
        self.pairs: list[tuple[Booking, list[int]]] = []  # live bookings: booking, [model's tokens]
        self.over: list[Booking] = []
        self.drained = 0.0
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
        self.unbegun += computed
        if index == 0:
            self.drained = max(0.0, self.drained - cell[0])
        self.drained = min(self.drained, self.total())

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        booking = data.draw(st.sampled_from(self.over))
        self.backlog.release(booking, computed=True, now=self.now, rate=RATE)

    @rule(requests=st.integers(0, 6))
    def begun(self, requests: int) -> None:
        self.backlog.begun(requests, now=self.now, rate=RATE)
        for _ in range(requests):
            if self.unbegun:
                self.unbegun -= 1
            elif self.pairs:
                booking, cell = self.pairs.pop(0)
                self.over.append(booking)
                self.drained = max(0.0, self.drained - cell[0])
        self.drained = min(self.drained, self.pairs[0][1][0] if self.pairs else 0)

    @rule()
    def settle(self) -> None:
        self.backlog.settle(now=self.now, rate=RATE)
        self.unbegun = 0
        taken = self.total() - self.backlog.tokens  # whole tokens: the product rounds
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
        check_backlog(self.backlog)
        expected = self.total() - self.drained
        assert self.backlog.undone_tokens(now=self.now, rate=RATE) == pytest.approx(expected, abs=1e-6)
        assert sum(b.tokens for b, _ in self.pairs) == self.total()
        assert not any(b in self.backlog.bookings for b in self.over)


TestBacklogAgainstNaiveModel = pytest.mark.slow(AgainstNaiveModel.TestCase)
