"""Replicas that share, in the simulator: together they find as many hits and spread load as well as one
picker, with little traffic.
"""

from __future__ import annotations

import pytest

from bench.routing import scale
from bench.routing.bench import Run, Setting, calibrate, simulate
from bench.routing.rows import Row, mean_row

SCALE = 0.5
SEEDS = (1, 2)
"""In shorter runs caches are still cold, and the spread of load differs by half between seeds."""


def row(capacity: tuple[float, float], *, replicas: int, share_delay_s: float | None = None) -> Row:
    setting = Setting(scale=SCALE, replicas=replicas, share_delay_s=share_delay_s)
    runs = [
        Run(
            workload="b2b",
            rule="least-cost",
            load=0.9,
            seed=seed,
            setting=setting,
            capacity_per_s=capacity[0],
            unloaded_s=capacity[1],
        )
        for seed in SEEDS
    ]
    return mean_row([simulate(run).row for run in runs])


@pytest.mark.slow
def test_four_replicas_that_share_hit_and_spread_load_like_one_replica() -> None:
    capacity = calibrate("b2b", Setting(scale=SCALE))
    one = row(capacity, replicas=1)
    four = row(capacity, replicas=4, share_delay_s=0.05)
    alone = row(capacity, replicas=4)
    assert four.hit_ratio >= 0.97 * one.hit_ratio
    assert four.load_cov <= 1.2 * one.load_cov
    assert four.completed >= one.completed - 0.01, "requests that still run at the end are not completed"
    assert alone.hit_ratio < 0.9 * one.hit_ratio, "otherwise this workload would show nothing"


@pytest.mark.slow
def test_pickers_that_share_and_pickers_apart_serve_many_servers() -> None:
    row, sent = scale.run(2, share=True, servers=16, rate_per_s=160, seconds=2)
    assert row.completed == 1.0
    assert sent > 30
    _, apart = scale.run(2, share=False, servers=16, rate_per_s=160, seconds=2)
    assert apart == 0
