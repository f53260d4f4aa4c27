"""Other requests overtake a demoted request only for a bounded time, whatever comes after it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from epp.flow.control import FlowControl
from epp.flow.flow_settings import FlowSettings
from epp.flow.request import QueueItem
from tests.unit.flow.a_fleet import AFleet, Ask, FlowGateway

STEP_S = 0.25

sizes = st.sampled_from([100, 500, 900, 1500, 4000, 12_000])


@given(
    num_servers=st.integers(1, 4),
    arrivals=st.lists(st.lists(sizes, max_size=4), min_size=8, max_size=40),
)
@settings(max_examples=30, deadline=None)
def test_no_demoted_request_waits_beyond_its_last_moment(num_servers: int, arrivals: list[list[int]]) -> None:
    """The last moment is fixed when the request is demoted. It follows from the wait in order of arrival
    and from the request's length.
    """
    fleet = AFleet(num_servers)
    gate = FlowGateway(
        FlowControl(FlowSettings(headroom_s=None, ttft_s=2.0, when_late="demote"), fleet), fleet
    )
    waiting: list[QueueItem[Ask]] = []
    last_at: dict[int, float] = {}
    number = 0
    while waiting or number < len(arrivals):
        now = STEP_S * number
        for tokens in arrivals[number] if number < len(arrivals) else []:
            waiting.append(gate.offer(Ask(tokens), now=now))
        gate.run(now=now, until=now + STEP_S)
        number += 1
        waiting = [item for item in waiting if item.waits]
        for item in waiting:
            if item.late:
                assert last_at.setdefault(item.number, item.last_at) == item.last_at
                assert now + STEP_S <= item.last_at
            else:
                assert now + STEP_S <= item.deadline


def test_a_request_that_is_demoted_after_its_last_moment_goes_at_once() -> None:
    """Short prompts overtake a long prompt until it is late. From then on none overtakes it."""
    fleet = AFleet(1)
    gate = FlowGateway(
        FlowControl(FlowSettings(order="shortest", ttft_s=6.0, when_late="demote"), fleet), fleet
    )
    gate.offer(Ask(1000), now=0.0)
    long = gate.offer(Ask(2000), now=0.0)
    now = 0.0
    while long not in gate.let_go:
        gate.offer(Ask(500), now=now + 2 * STEP_S)
        now = gate.run(now=now + 2 * STEP_S, until=now + 2 * STEP_S)
        assert long in gate.let_go or not long.late or now <= long.last_at
    assert long.late
