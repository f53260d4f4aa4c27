"""One client that sends one request at a time to equal, idle servers. Every score is a tie but for the noise
in the learned rates, so a rule that believes the noise fills one cache and leaves the others empty.
"""

import itertools
import random

import pytest

from bench.routing.picker_router import PickerRouter
from bench.routing.workloads import ClosedLoop, Turn, one_client
from epp.config.policy import DEFAULT_POLICY
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Fleet, FleetPlan

_SHAPE = EngineShape(num_blocks=3_000, block_tokens=16)
"""A cache holds nine prompts of 5,000 tokens, so four hold 36."""


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_fit_the_fleet_are_cached_from_the_second_round(seed: int) -> None:
    rng = random.Random(seed)
    warm_up = [[Turn(rng.randint(100, 3000), answer_tokens=16, think_s=0.2)] for _ in range(120)]
    sessions = itertools.chain(warm_up, one_client(rng, prompts=24, tokens=5000))
    workload = ClosedLoop(sessions, users=1, until_s=200.0, ramp_s=0.0)
    router = PickerRouter(DEFAULT_POLICY, seed=seed)
    plan = FleetPlan(shape=_SHAPE, num_servers=4)
    records = Fleet(plan, router=router, workload=workload, rng=random.Random(seed)).run().records
    again = records[120 + 24 :][:48]
    shares = [(record.num_cached_tokens or 0) / record.num_prompt_tokens for record in again]
    assert sum(share > 0.9 for share in shares) == 48
