"""With equal servers, no server holds over twice the mean of distinct tokens while others have room.

The prompts share nothing, so nothing but the costs and the room decides. The servers are simulated, and the
picker learns their rates from their pages: rates that differ by chance send no more prompts to one server.
"""

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.routing.picker_router import PickerRouter
from epp.config.policy import DEFAULT_POLICY
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Fleet, FleetPlan
from model_server.sim.prompts import Segment
from model_server.sim.request import Record, SimRequest

pytestmark = pytest.mark.slow
SIZES = (64, 400, 2000, 12_000)
"""Tokens of the prompts, in turn."""


class Arrivals:
    def __init__(self, arrivals: Sequence[tuple[float, int]]) -> None:
        """Take the gap before each request, and the number of its prompt."""
        self._arrivals = arrivals

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        now = 0.0
        for number, (gap_s, prompt) in enumerate(self._arrivals):
            now += gap_s
            segments = (Segment(prompt, SIZES[prompt % len(SIZES)]),)
            answer = Segment(10**6 + number, 20)
            yield now, SimRequest(request_id=number, segments=segments, answer=answer)

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        return ()


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0, 5.0]), st.integers(0, 60)),
        min_size=8,
        max_size=80,
    ),
    num_servers=st.integers(2, 5),
)
@settings(max_examples=60, deadline=None)
def test_no_equal_server_holds_over_twice_the_mean_while_others_have_room(
    arrivals: list[tuple[float, int]], num_servers: int
) -> None:
    """One prompt more is allowed, since a prompt cannot be divided."""
    plan = FleetPlan(
        shape=EngineShape(num_blocks=8_000, block_tokens=64),
        num_servers=num_servers,
        horizon_s=sum(gap_s for gap_s, _ in arrivals) + 60.0,
    )
    router = PickerRouter(DEFAULT_POLICY, seed=1)
    fleet = Fleet(plan, router=router, workload=Arrivals(arrivals), rng=random.Random(1))
    got: dict[str, set[int]] = {}
    for record in fleet.run().records:
        assert record.server
        got.setdefault(record.server, set()).add(record.request.segments[0].segment_id)
    held = [sum(SIZES[prompt % len(SIZES)] for prompt in prompts) for prompts in got.values()]
    assert max(held) <= 2 * sum(held) / num_servers + max(SIZES), held
