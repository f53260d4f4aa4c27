"""A calibration finds the costs of a server whose costs are known. The engine answers its probes under a
virtual clock.
"""

from __future__ import annotations

import itertools
import random

import pytest

from model_server.calibrate.fit import FitError, fit
from model_server.calibrate.probes import (
    LATE_AFTER_TOKENS,
    DecodeSample,
    PrefillSample,
    Probe,
    Sample,
    Trace,
    fastest,
    plan,
    sample_of,
)
from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel, CostRunner

SLOW = CostModel(
    prefill_tokens_per_s=900.0,
    context_knee_tokens=6000.0,
    decode_step_s=0.05,
    decode_per_request_s=0.004,
    decode_per_context_token_s=3e-6,
    interference=0.3,
)


class VirtualServer:
    """Answers probes in no time, and says how long they would have taken. Each of these times varies by up to
    `noise_s`. A share `stalls` of the steps takes three times as long, as if another program used the
    machine.
    """

    def __init__(
        self, costs: CostModel, *, budget: int = 2048, noise_s: float = 0.0, stalls: float = 0.0
    ) -> None:
        runner = CostRunner(costs, max_loras=1, next_token=lambda _: TokenId(1))
        config = EngineConfig(eos_token_id=NO_TOKEN, limits=SchedulerLimits(max_num_batched_tokens=budget))
        self._engine = Engine(config, runner)
        self._ids = itertools.count()
        self._rng = random.Random(1)
        self._noise_s = noise_s
        self._stalls = stalls
        self._now = 0.0

    def observe(self, probe: Probe) -> list[Trace]:
        sent = [self._send(length, probe.answer_tokens, at_s=self._now) for length in probe.together]
        late: Request | None = None
        times: dict[RequestId, list[float]] = {}
        while self._engine.num_unfinished:
            plan_of_step = self._engine.begin(now=self._now)
            result = self._engine.runner.execute(plan_of_step)
            ready = all(len(times.get(request.request_id, ())) >= LATE_AFTER_TOKENS for request in sent)
            if probe.late_tokens and late is None and ready:
                late = self._send(probe.late_tokens, 1, at_s=self._now + 0.3 * result.duration_s)
                sent.append(late)
            self._now += result.duration_s * (3 if self._rng.random() < self._stalls else 1)
            for output in self._engine.finish(plan_of_step, result, now=self._now):
                moment = self._now + self._rng.uniform(0, self._noise_s)
                times.setdefault(output.request.request_id, []).append(moment)
        return [Trace(request.arrival_s, times[request.request_id]) for request in sent]

    def _send(self, num_tokens: int, answer_tokens: int, *, at_s: float) -> Request:
        tokens = [TokenId(self._rng.randrange(10**6)) for _ in range(num_tokens)]
        name = RequestId(str(next(self._ids)))
        request = Request(name, tokens, max_tokens=answer_tokens, arrival_s=at_s)
        self._engine.add(request)
        return request


def calibrated(server: VirtualServer) -> CostModel:
    probes = plan(max_prompt_tokens=2048)
    measured: dict[Probe, list[Sample]] = {probe: [] for probe in probes}
    for probe in probes:
        sample = sample_of(probe, server.observe(probe))
        assert sample is not None
        measured[probe].append(sample)
    return fit(fastest(measured))


@pytest.mark.parametrize("costs", [SLOW, CostModel()], ids=["slow", "defaults"])
@pytest.mark.parametrize("budget", [256, 2048])
def test_the_costs_of_a_known_server_are_found(costs: CostModel, budget: int) -> None:
    found = calibrated(VirtualServer(costs, budget=budget))
    assert found.prefill_tokens_per_s == pytest.approx(costs.prefill_tokens_per_s, rel=0.02)
    assert found.context_knee_tokens == pytest.approx(costs.context_knee_tokens, rel=0.1)
    assert found.decode_step_s == pytest.approx(costs.decode_step_s, rel=0.01)
    assert found.decode_per_request_s == pytest.approx(costs.decode_per_request_s, rel=0.05)
    assert found.decode_per_context_token_s == pytest.approx(costs.decode_per_context_token_s, rel=0.1)
    assert found.interference == pytest.approx(costs.interference, abs=0.02)


def test_noise_costs_a_tenth_of_the_precision() -> None:
    found = calibrated(VirtualServer(SLOW, noise_s=0.004))
    assert found.prefill_tokens_per_s == pytest.approx(SLOW.prefill_tokens_per_s, rel=0.1)
    assert found.decode_step_s == pytest.approx(SLOW.decode_step_s, rel=0.1)
    assert found.interference == pytest.approx(SLOW.interference, abs=0.1)


def test_costs_are_found_even_if_other_programs_use_the_machine() -> None:
    found = calibrated(VirtualServer(SLOW, stalls=0.1))
    assert found.prefill_tokens_per_s == pytest.approx(SLOW.prefill_tokens_per_s, rel=0.02)
    assert found.decode_step_s == pytest.approx(SLOW.decode_step_s, rel=0.02)


def test_a_server_without_a_knee_or_cost_of_context_is_fitted_without_them() -> None:
    flat = CostModel(context_knee_tokens=1e9, decode_per_context_token_s=0.0, decode_per_request_s=0.0)
    costs = calibrated(VirtualServer(flat))
    assert costs.context_knee_tokens > 1e6
    assert costs.decode_per_context_token_s == pytest.approx(0, abs=1e-9)
    assert costs.decode_per_request_s == pytest.approx(0, abs=1e-6)


def test_samples_without_information_are_refused_with_what_is_missing() -> None:
    same = [DecodeSample(1, 40.0, 0.1)] * 5
    with pytest.raises(FitError, match="too similar"):
        fit(same)
    decodes = [DecodeSample(batch, 40.0 * batch + extra, 0.1) for batch in (1, 2) for extra in (0, 99)]
    with pytest.raises(FitError, match="send longer prompts"):
        fit([*decodes, *(PrefillSample(n, 0.1) for n in (10, 20, 30))])


def test_a_late_prompt_that_came_after_the_answer_gives_no_sample() -> None:
    ended = Trace(0.0, (1.0, 2.0, 3.0))
    assert sample_of(Probe((8,), 3, 8), [ended, Trace(3.5, (4.0,))]) is None
