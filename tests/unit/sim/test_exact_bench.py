"""The benchmark of exact mode. Its picker hears which blocks the simulated servers hold, and nothing else."""

from __future__ import annotations

import random

from bench.routing.bench import Setting, plan_of, spec_of
from bench.routing.exact_mode import ExactRouter, ReportingFleet, Trial, block_name
from bench.routing.workloads import OpenLoop
from epp.config.policy import DEFAULT_POLICY
from epp.types import EndpointName


def test_the_picker_of_the_exact_mode_benchmark_knows_the_blocks_of_its_servers() -> None:
    trial = Trial(workload="hot", situation="small caches", exact=True, seed=1, load=0.5, capacity_per_s=20.0)
    spec = spec_of("hot")
    assert spec.make is not None
    workload = OpenLoop(spec.make(random.Random(1), 60), rate_per_s=10.0)
    plan = plan_of(Setting(num_servers=2), spec, arrivals_s=workload.last_arrival_s)
    router = ExactRouter(trial, policy=DEFAULT_POLICY, block_tokens=plan.shape.block_tokens)
    fleet = ReportingFleet(plan, router=router, workload=workload, rng=random.Random(1))
    fleet.events = router.events
    outcome = fleet.run()
    for now in (outcome.ended_s, outcome.ended_s + 1.0):
        router.advance(now)
    assert router.knowledge is not None
    router.knowledge.check_integrity()
    for name, engine in fleet.engines.items():
        blocks = router.knowledge.servers[EndpointName(name)].blocks
        assert blocks is not None
        names = {block_name(b.block_hash) for b in engine.pool.blocks if b.block_hash is not None}
        assert blocks.hold(names)
        assert len(blocks) == len(names)
        assert router.knowledge.servers[EndpointName(name)].held
