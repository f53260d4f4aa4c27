"""`make bench-rivals`, for two seconds: each gateway before its own servers answers the same requests."""

import pytest

from bench.routing.live import rivals
from tests.group_env import RIVALS
from tests.harness.prepared import prepared
from tests.vllm_env.environment import REQUIRED

pytestmark = [pytest.mark.envoy, pytest.mark.slow]


@pytest.mark.parametrize("place", ["groups and questions", "half of each prompt shared"])
async def test_every_gateway_answers_the_same_requests(place: str) -> None:
    prepared(RIVALS.require, required_by=REQUIRED)
    made = await rivals.runs_of([place], seeds=1, seconds=2.0)
    assert [name for _, name in made] == list(rivals.GATEWAYS)
    runs = [run for [run] in made.values()]
    assert len({run.row.requests for run in runs}) == 1
    for run in runs:
        assert run.failures == []
        assert run.row.completed == 1.0
        assert run.cpu_ms > 0
    assert all(name in rivals.report(made) for name in rivals.GATEWAYS)
