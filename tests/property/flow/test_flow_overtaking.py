"""A demoted request is overtaken for a bounded time, whatever comes after it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from epp.flow.control import FlowControl
from epp.flow.request import Held
from epp.flow.settings import FlowSettings
from tests.unit.flow.a_fleet import RATE, AFleet, Ask, Gateway

GOAL_S = 2.0
STEP_S = 0.25
LOOKED_AT_S = 1.0
"""A fleet without room is looked at so often."""

sizes = st.sampled_from([100, 500, 900, 1500, 4000, 12_000])


@given(
    num_servers=st.integers(1, 4),
    arrivals=st.lists(st.lists(sizes, max_size=4), min_size=8, max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_no_request_waits_longer_than_its_wait_in_order_of_arrival_allows(
    num_servers: int, arrivals: list[list[int]]
) -> None:
    """At most 1.5 times: its wait in order of arrival, and four times what it takes itself."""
    fleet = AFleet(num_servers)
    gate = Gateway(
        FlowControl(FlowSettings(headroom_s=None, ttft_s=GOAL_S, when_late="demote", goal_s=GOAL_S), fleet),
        fleet,
    )
    in_order = _InOrder(num_servers)
    latest_s: dict[int, float] = {}
    waiting: list[Held[Ask]] = []
    went_s: dict[int, float] = {}
    now = 0.0
    while waiting or now < STEP_S * len(arrivals):
        for tokens in arrivals[round(now / STEP_S)] if now < STEP_S * len(arrivals) else []:
            wait_s = in_order.wait_s(tokens / RATE, now=now)
            held = gate.offer(Ask(tokens), now=now)
            own_s = tokens / RATE
            latest_s[held.number] = now + GOAL_S + 1.5 * (wait_s + min(4.0, own_s / GOAL_S) * own_s)
            waiting.append(held)
        gate.run(now=now, until=now + STEP_S)
        now += STEP_S
        for held in [held for held in waiting if not held.waits]:
            waiting.remove(held)
            went_s[held.number] = now
    for number, at in went_s.items():
        assert at <= latest_s[number] + LOOKED_AT_S + STEP_S


class _InOrder:
    """Servers that share all work as it comes: the shortest possible wait in order of arrival."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._free_at = 0.0

    def wait_s(self, own_s: float, *, now: float) -> float:
        wait_s = max(0.0, self._free_at - now)
        self._free_at = now + wait_s + own_s / self._num_servers
        return wait_s
