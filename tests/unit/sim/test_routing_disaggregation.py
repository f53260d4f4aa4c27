"""The simulated fleet with prefill and decode apart."""

from __future__ import annotations

from bench.routing.disaggregation import run
from epp.config.disaggregation import Disaggregation


def test_answers_are_more_even_if_prompts_are_computed_elsewhere() -> None:
    usual = Disaggregation()
    together = run(prefillers=0, rate_per_s=3.5, seed=1, count=200, settings=usual)
    apart = run(prefillers=6, rate_per_s=3.5, seed=1, count=200, settings=usual)
    assert together.moved == 0
    assert apart.moved > 0.5
    assert apart.tpot_p90_s < 0.5 * together.tpot_p90_s
    assert apart.good > together.good


def test_over_a_slow_network_no_prompt_is_moved() -> None:
    slow = Disaggregation(transfer_bytes_per_second=1e7)
    assert run(prefillers=4, rate_per_s=1.0, seed=1, count=60, settings=slow).moved == 0
