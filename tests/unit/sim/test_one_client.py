"""One client that sends one request at a time to equal, idle servers. Every score is a tie but for the noise
in the learned rates, so a rule that believes the noise fills one cache and leaves the others empty.
"""

import random
from collections.abc import Iterable

import pytest

from bench.routing.picker_router import PickerRouter
from epp.config.policy import DEFAULT_POLICY
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Fleet, FleetPlan
from model_server.sim.prompts import Segment
from model_server.sim.request import Record, SimRequest

_SERVERS = 4
_SHAPE = EngineShape(num_blocks=3_000, block_tokens=16)
"""A cache holds nine prompts of 5,000 tokens, so four hold 36."""


class OneAtATime:
    """Sends the prompts one after the other, each `pause_s` after the answer to the one before."""

    def __init__(self, prompts: Iterable[tuple[int, int]], *, pause_s: float) -> None:
        """prompts: the number and the tokens of each."""
        self._left = list(prompts)[::-1]
        self._pause_s = pause_s
        self._sent = 0

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        return self._next(0.0)

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        return self._next(now + self._pause_s)

    def _next(self, when: float) -> Iterable[tuple[float, SimRequest]]:
        if not self._left:
            return []
        prompt, tokens = self._left.pop()
        self._sent += 1
        answer = Segment(10**9 + self._sent, 16)
        segments = (Segment(1000 + prompt, tokens),)
        return [(when, SimRequest(request_id=self._sent, segments=segments, answer=answer))]


def served(prompts: list[tuple[int, int]], *, pause_s: float, seed: int) -> list[Record]:
    router = PickerRouter(DEFAULT_POLICY, seed=seed)
    plan = FleetPlan(shape=_SHAPE, num_servers=_SERVERS)
    workload = OneAtATime(prompts, pause_s=pause_s)
    return Fleet(plan, router=router, workload=workload, rng=random.Random(seed)).run().records


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_fit_the_fleet_are_cached_from_the_second_round(seed: int) -> None:
    rng = random.Random(seed)
    warm_up = [(500 + n, rng.randint(100, 3000)) for n in range(120)]
    rounds = [(n, 5000) for n in range(24)] * 3
    last = served([*warm_up, *rounds], pause_s=0.2, seed=seed)[-48:]
    shares = [(record.num_cached_tokens or 0) / record.num_prompt_tokens for record in last]
    assert sum(share > 0.9 for share in shares) == 48
