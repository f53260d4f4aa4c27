"""The comparison on real vLLM servers, here without them: its conversations on the simulated side."""

from __future__ import annotations

import pytest

from bench.routing.live import vllm
from bench.routing.live.vllm_fleet import Speed
from epp.config.policy import RuleName

SPEED = Speed(alone_tokens_per_s=400.0, together_tokens_per_s=200.0, step_s=0.1)


@pytest.mark.parametrize("rule", vllm.DEFAULTS)
def test_the_conversations_run_in_the_simulator_by_every_rule(rule: RuleName) -> None:
    first, again = (
        vllm.simulated(rule, setting=vllm.SETTING, seed=1, seconds=30.0, speed=SPEED) for _ in range(2)
    )
    assert first == again
    assert first.requests > 20
    assert first.hit_ratio > 0.2
