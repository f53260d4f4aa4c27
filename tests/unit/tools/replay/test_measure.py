"""What is measured of one simulated request."""

import pytest

from epp.tools.replay.simulate import quantile, tpot_s, ttft_s
from model_server.sim.prompts import Segment
from model_server.sim.request import Record, SimRequest


def record(
    *, tokens: int = 11, first: float | None = 3.0, ended: float | None = 4.0, failed: bool = False
) -> Record:
    request = SimRequest(request_id=1, segments=(Segment(1, 10),), answer=Segment(2, tokens))
    made = Record(request=request, arrived_s=1.0)
    made.first_token_s, made.ended_s, made.failed = first, ended, failed
    return made


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.9, 5.0), (1.0, 5.0)])
def test_a_quantile_is_one_of_the_values(share: float, value: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], share) == value
    assert quantile([], share) == 0.0


def test_a_request_without_a_first_token_waited_until_the_end_of_the_run() -> None:
    assert ttft_s(record(), 100.0) == 2.0
    assert ttft_s(record(first=None), 100.0) == 99.0


def test_further_tokens_are_timed_only_for_whole_answers_of_several_tokens() -> None:
    assert tpot_s(record()) == pytest.approx(0.1)
    assert tpot_s(record(tokens=1)) is None
    assert tpot_s(record(failed=True)) is None
    assert tpot_s(record(first=None)) is None
