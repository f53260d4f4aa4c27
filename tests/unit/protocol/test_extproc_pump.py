"""The gate's timer, in simulated time: when it pumps the gate, and that it outlives a fault of the gate."""

import asyncio
import selectors
from collections.abc import Iterator

import pytest

from epp.picker.gate import NO_CLAIM
from epp.transport.server import Pump
from tests.unit.picker.picker_questions import ask
from tests.unit.protocol.stream_bench import DUPLEX, refused
from tests.unit.protocol.waiting_bench import Held


class Jumping(selectors.SelectSelector):
    """A selector that does not wait. It moves the clock of its loop by the time for which it should wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_until(self, moment: float) -> None:
        self.call_at(moment, self.stop)
        self.run_forever()


class Timer:
    """The timer of a gate in front of busy servers, and the moments at which the timer pumped the gate."""

    def __init__(self, loop: SimulatedLoop, held: Held) -> None:
        self.pumped_at: list[float] = []
        self.pump = Pump(held.gate, clock=loop.time, after=self._pumped)

    def _pumped(self, *, now: float) -> None:
        self.pumped_at.append(round(now, 3))


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    made = SimulatedLoop()
    yield made
    made.close()


def test_events_of_one_moment_are_answered_together(loop: SimulatedLoop) -> None:
    timer = Timer(loop, Held())
    for _ in range(3):
        loop.call_soon(timer.pump.soon)
    loop.run_until(9.0)
    assert timer.pumped_at == [1.002]


def test_while_a_request_waits_the_gate_is_pumped(loop: SimulatedLoop) -> None:
    held = Held(ttl_seconds=3.5)
    held.waits(DUPLEX)
    timer = Timer(loop, held)
    loop.call_soon(timer.pump.soon)
    loop.call_at(2.5, timer.pump.soon)
    loop.run_until(9.0)
    assert timer.pumped_at == [1.002, 2.002, 2.502, 3.502, 4.5]
    assert refused(held.later).reason == "flow_ttl"


def test_after_a_fault_the_others_are_looked_at_again(
    loop: SimulatedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_fate: object, _now: float) -> None:
        raise RuntimeError("a bug")

    held = Held(ttl_seconds=3.5)
    held.waits(DUPLEX)
    request = ask(b"tell me about foxes " * 40)
    held.gate.offer(request, NO_CLAIM, broken, size_bytes=800, longest_s=2.0, now=1.0)
    assert held.gate.waiting == 2
    timer = Timer(loop, held)
    loop.call_soon(timer.pump.soon)
    loop.run_until(9.0)
    assert timer.pumped_at == [1.002, 2.002, 3.0, 3.1, 4.1, 4.5]
    assert "flow control failed" in caplog.text
    assert refused(held.later).reason == "flow_ttl"


def test_a_timer_that_was_stopped_pumps_no_more(loop: SimulatedLoop) -> None:
    held = Held(ttl_seconds=3.5)
    held.waits(DUPLEX)
    timer = Timer(loop, held)
    loop.call_soon(timer.pump.soon)
    loop.call_at(1.5, timer.pump.stop)
    loop.call_at(1.6, timer.pump.soon)
    loop.run_until(9.0)
    assert timer.pumped_at == [1.002]
    assert held.later == []
