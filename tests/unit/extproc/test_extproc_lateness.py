"""How long bytes have waited: a loop in simulated time that looks, reads and works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from epp.extproc.peer import Lateness

NEVER = -2


@dataclass
class Loop:
    """A loop in simulated time. `slowness`: elapsed seconds for each CPU second of the thread."""

    slowness: float = 1.0
    now: float = 10.0
    cpu: float = 1.0
    asked: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lateness = Lateness(lambda: self.now, lambda: self.cpu)

    def works(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds / self.slowness

    def looks(self) -> None:
        """Begin the next iteration of the loop."""
        asked, self.asked[:] = list(self.asked), []
        for each in asked:
            each()

    def turn(self, *, before: float, seconds: float, resumed: int = NEVER) -> float:
        """Read and handle the bytes that have come. Return how long they may have waited before the turn."""
        came_after = self.lateness.read(before=before, resumed=resumed, now=self.now)
        waited = self.now - came_after
        self.works(seconds)
        self.ends_turn()
        return waited

    def ends_turn(self) -> None:
        if self.lateness.worked():
            self.asked.append(self.lateness.look)


@pytest.mark.parametrize("slowness", [1.0, 8.0])
def test_messages_that_came_while_the_loop_worked_have_waited_since_the_previous_read(
    slowness: float,
) -> None:
    loop, read_at = Loop(slowness), 0.0
    waits = []
    for _ in range(5):
        before, read_at = read_at, loop.now
        waits.append(loop.turn(before=before, seconds=0.03))
        loop.looks()
    assert waits[0] == 0.0
    assert waits[1:] == pytest.approx([0.03] * 4)


@pytest.mark.parametrize("slowness", [1.0, 8.0])
def test_messages_to_an_idle_loop_have_not_waited(slowness: float) -> None:
    loop, read_at = Loop(slowness), 0.0
    for _ in range(5):
        before, read_at = read_at, loop.now
        assert loop.turn(before=before, seconds=0.003) == 0.0
        loop.looks()
        loop.now += 0.5


def test_other_work_between_the_start_of_an_iteration_and_the_read_counts_as_wait() -> None:
    loop, read_at = Loop(slowness=4.0), 0.0
    for _ in range(3):
        before, read_at = read_at, loop.now
        waited = loop.turn(before=before, seconds=0.01)
        loop.looks()
        loop.works(0.04)  # for example, the picker reads a metrics page
    assert waited == pytest.approx(0.05)


def test_a_connection_that_was_quiet_while_others_kept_the_loop_busy_has_waited_one_iteration() -> None:
    loop, read_at = Loop(), 0.0
    for _ in range(50):
        before, read_at = read_at, loop.now
        loop.turn(before=before, seconds=0.02)
        loop.looks()
    assert loop.turn(before=10.0, seconds=0.02) == pytest.approx(0.02)


def test_a_connection_whose_reading_was_paused_has_waited_since_its_last_read() -> None:
    loop = Loop()
    first = loop.now
    loop.turn(before=0.0, seconds=0.01)
    for _ in range(20):
        loop.looks()
        loop.lateness.goes_on()
        loop.works(0.01)
        loop.ends_turn()
    resumed = loop.lateness.looks
    loop.looks()
    assert loop.turn(before=first, seconds=0.01, resumed=resumed) == pytest.approx(0.21)
    loop.looks()
    loop.looks()
    assert loop.turn(before=first, seconds=0.01, resumed=resumed) == pytest.approx(0.01)


def test_after_short_turns_the_next_iteration_is_observed_only_now_and_then() -> None:
    loop = Loop()
    asked = 0
    for _ in range(100):
        assert loop.turn(before=loop.now, seconds=0.0001) <= 0.0011
        asked += len(loop.asked)
        loop.looks()
    assert 3 <= asked <= 5


def test_messages_after_a_short_turn_of_a_slow_thread_have_not_waited() -> None:
    loop = Loop(slowness=20.0)
    loop.turn(before=0.0, seconds=0.02)
    loop.looks()
    for slowness in (1.0, 1.0):
        loop.now += 0.5
        loop.slowness = slowness
        loop.turn(before=0.0, seconds=0.0009)
        loop.looks()
    loop.now += 0.005
    assert loop.turn(before=0.0, seconds=0.0009) == 0.0
