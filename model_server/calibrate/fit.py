"""Computes the cost model's figures from samples, by least squares on relative errors. This module does no
I/O.

Prefill alone takes a + n / rate + n² / (2 · rate · knee). Here a is the cost of a request besides its
computation (network, scheduling). The cost model has no place for this cost, so it is left out.
Decode takes step + per request + per context token. The cost of prefill beside decode is the time that both
take together, beyond the times that each takes alone. Figures that would be below zero are set to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from model_server.calibrate.probes import DecodeSample, MixedSample, PrefillSample, Sample
from model_server.runners.cost import CostModel

_NO_KNEE_TOKENS = 1e9
"""The context knee that is used if prefill showed no growth with context."""


class FitError(Exception):
    """The samples do not determine the costs. The message says which samples are missing."""


def fit(samples: Sequence[Sample]) -> CostModel:
    decodes = [sample for sample in samples if isinstance(sample, DecodeSample)]
    prefills = [sample for sample in samples if isinstance(sample, PrefillSample)]
    rows = [(1.0, sample.batch - 1.0, sample.context_tokens) for sample in decodes]
    step_s, per_request_s, per_token_s = _least_squares(rows, [sample.seconds for sample in decodes])

    # A prompt shorter than a step takes a whole step, so it shows nothing about prefill.
    clear = [sample for sample in prefills if sample.seconds > 1.5 * step_s]
    if len({sample.num_tokens for sample in clear}) < 3:
        raise FitError(
            "fewer than three prompt lengths took clearly longer than a decode step: send longer prompts"
        )
    lengths = [float(sample.num_tokens) for sample in clear]
    _, slope, bend = _least_squares([(1.0, n, n * n) for n in lengths], [sample.seconds for sample in clear])
    if slope <= 0:
        raise FitError("prefill time did not grow with the prompt: the samples are too noisy")
    alone = CostModel(
        prefill_tokens_per_s=1 / slope,
        context_knee_tokens=min(slope / (2 * bend), _NO_KNEE_TOKENS) if bend > 0 else _NO_KNEE_TOKENS,
        decode_step_s=step_s,
        decode_per_request_s=per_request_s,
        decode_per_context_token_s=per_token_s,
        interference=0.0,
    )
    mixed = [sample for sample in samples if isinstance(sample, MixedSample)]
    shares = [_interference(alone, sample) for sample in mixed]
    interference = max(0.0, median(shares)) if shares else CostModel().interference
    return replace(alone, interference=interference)


def _decode_s(costs: CostModel, sample: DecodeSample | MixedSample) -> float:
    """Return the time of one step that decodes this many requests."""
    return (
        costs.decode_step_s
        + costs.decode_per_request_s * (sample.batch - 1)
        + costs.decode_per_context_token_s * sample.context_tokens
    )


def _interference(costs: CostModel, sample: MixedSample) -> float:
    prefill = costs.prefill_s(start=0, num_tokens=sample.num_tokens)
    return (sample.seconds - sample.steps * _decode_s(costs, sample)) / prefill - 1


def _least_squares(rows: Sequence[tuple[float, ...]], seen: Sequence[float]) -> list[float]:
    """Return the coefficients with the least relative errors, none of them below zero. The most negative
    coefficient is removed until none is negative. Columns are scaled, because squared lengths are large.
    """
    weighted = np.array(rows) / np.array(seen)[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), np.finfo(float).tiny)
    used = list(range(weighted.shape[1]))
    while True:
        found, _, rank, _ = np.linalg.lstsq(weighted[:, used] / scale[used], np.ones(len(seen)))
        if rank < len(used):
            raise FitError("the probes are too similar to determine the costs separately")
        worst = int(found.argmin())
        if found[worst] >= 0 or len(used) == 1:
            break
        del used[worst]
    coefficients = dict(zip(used, (found / scale[used]).tolist(), strict=True))
    return [max(0.0, coefficients.get(i, 0.0)) for i in range(weighted.shape[1])]
