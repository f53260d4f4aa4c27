"""Which connections the event loop serves next, in simulated time."""

import asyncio
from dataclasses import dataclass

import pytest

from epp.transport.turns import AT_ONCE_S, MOST_AT_ONCE_S, AddressTurns, Turns


@dataclass(eq=False)
class Busy:
    """A connection that always has work. Each of its turns takes `takes_s`."""

    turns: Turns
    clock: list[float]
    source: AddressTurns
    takes_s: float = 0.001
    urgent: bool = True
    used_s: float = 0.0
    served: int = 0

    def __post_init__(self) -> None:
        self.source.guests.add(self)

    def go_on(self) -> None:
        self.served += 1
        self.turn(self.takes_s)
        self.turns.wait(self)

    def turn(self, takes_s: float) -> None:
        began, self.clock[0] = self.clock[0], self.clock[0] + takes_s
        self.turns.busy_s += takes_s
        if self.turns.asked or self.turns.busy_s > AT_ONCE_S:
            self.turns.took(self, began=began, now=self.clock[0])

    def give_way(self) -> None:
        raise AssertionError


class Loop:
    def __init__(self) -> None:
        self.clock = [10.0]
        self.turns = Turns(lambda: self.clock[0])

    def busy(self, source: AddressTurns, *, takes_s: float = 0.001, urgent: bool = True) -> Busy:
        return Busy(self.turns, self.clock, source, takes_s=takes_s, urgent=urgent)

    async def run(self, *guests: Busy, iterations: int) -> None:
        for guest in guests:
            self.turns.wait(guest)
        for _ in range(iterations):
            await asyncio.sleep(0)


async def test_one_iteration_of_the_loop_serves_the_line_for_a_few_milliseconds() -> None:
    loop = Loop()
    guests = [loop.busy(AddressTurns(str(n))) for n in range(100)]
    await loop.run(*guests, iterations=1)
    assert 1 <= sum(guest.served for guest in guests) <= 4
    await loop.run(iterations=200)
    assert min(guest.served for guest in guests) > 0


@pytest.mark.parametrize("takes_s", [0.0001, 0.05])
async def test_who_has_used_little_time_waits_for_one_turn(takes_s: float) -> None:
    loop = Loop()
    heavy = [loop.busy(AddressTurns(str(n)), takes_s=takes_s) for n in range(50)]
    await loop.run(*heavy, iterations=200)
    light = loop.busy(AddressTurns("light"))
    before = sum(guest.served for guest in heavy)
    await loop.run(light, iterations=1)
    assert light.served >= 1
    assert sum(guest.served for guest in heavy) - before <= 0.002 / takes_s + 1


async def test_the_connections_of_one_address_have_one_share_of_the_time() -> None:
    loop = Loop()
    crowd, alone = AddressTurns("crowd"), loop.busy(AddressTurns("alone"))
    many = [loop.busy(crowd) for _ in range(20)]
    await loop.run(alone, *many, iterations=500)
    assert alone.served == pytest.approx(sum(guest.served for guest in many), rel=0.1)


async def test_calls_of_ext_proc_have_most_of_the_time() -> None:
    loop = Loop()
    data_plane = loop.busy(AddressTurns("envoy"))
    others = [loop.busy(AddressTurns(str(n)), urgent=False) for n in range(4)]
    await loop.run(data_plane, *others, iterations=500)
    assert data_plane.served > 1.5 * sum(guest.served for guest in others)
    assert min(guest.served for guest in others) > 10, "health checks are answered all the same"


async def test_turns_at_once_end_after_some_milliseconds_until_next_iteration() -> None:
    loop = Loop()
    guest = loop.busy(AddressTurns("a"))
    assert loop.turns.busy_s <= MOST_AT_ONCE_S
    for _ in range(6):
        guest.turn(0.001)
    assert loop.turns.busy_s > MOST_AT_ONCE_S
    await asyncio.sleep(0)
    assert loop.turns.busy_s <= MOST_AT_ONCE_S


async def test_time_used_while_nobody_waited_is_not_held_against_anyone() -> None:
    loop = Loop()
    first, second = (loop.busy(AddressTurns(name)) for name in "ab")
    for _ in range(1000):
        first.turn(0.01)
    await loop.run(first, second, iterations=200)
    assert abs(first.served - second.served) <= 21


async def test_bytes_may_have_come_since_the_busy_loop_last_looked_for_bytes() -> None:
    loop = Loop()
    guest = loop.busy(AddressTurns("a"))
    for _ in range(2):
        at = loop.clock[0]
        guest.turn(0.03)
        await asyncio.sleep(0)
        assert loop.turns.busy_since == at
    await asyncio.sleep(0)
    assert loop.turns.busy_since == float("inf"), "the loop has rested"
    guest.turn(0.0001)
    await asyncio.sleep(0)
    assert loop.turns.busy_since == float("inf"), "a short turn keeps nobody waiting"


async def test_after_a_turn_that_fails_the_others_have_theirs() -> None:
    loop = Loop()
    failing, other = (loop.busy(AddressTurns(name)) for name in "ab")
    failing.turn = None  # type: ignore[assignment, method-assign]
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await loop.run(failing, other, iterations=3)
    assert (failing.served, other.served > 0) == (1, True)
