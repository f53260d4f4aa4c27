"""Plans the probes of a calibration, and turns the times of their tokens into samples for the cost model.
This module does no I/O.

There are three kinds of probe: one prompt alone (prefill), several requests that decode together (decode),
and a prompt that comes while others decode (both in one step). Prompts are random tokens, so no cache ever
holds a part of them. Callers: the command, and tests that answer probes from an engine under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

LATE_AFTER_TOKENS = 4
"""The late prompt is sent when each of the other requests has this many tokens."""
_SHORT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe sends prompts of the lengths `together` at once, and each gets `answer_tokens`. If
    `late_tokens` is set, one more prompt of this length follows.
    """

    together: tuple[int, ...]
    answer_tokens: int
    late_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The times of one request: when it was sent, and when each of its tokens came."""

    sent_s: float
    token_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class PrefillSample:
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A step that decodes `batch` requests, whose contexts have `context_tokens` together."""

    batch: int
    context_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class MixedSample:
    """A prompt that was computed within `steps` steps, which also decoded `batch` requests."""

    num_tokens: int
    batch: int
    context_tokens: float
    steps: int
    seconds: float


Sample = PrefillSample | DecodeSample | MixedSample


def plan(*, max_prompt_tokens: int) -> list[Probe]:
    """Return the probes, each three times. A slow minute affects all kinds alike."""
    half = max_prompt_tokens // 2
    once = [
        *(Probe((max_prompt_tokens // divisor,), 1) for divisor in (8, 4, 3, 2, 1)),
        *(Probe((_SHORT_TOKENS,) * batch, 24) for batch in (1, 2, 4, 8)),
        *(Probe((half,) * batch, 24) for batch in (1, 2, 4)),
        *(Probe((_SHORT_TOKENS,) * batch, 64, half) for batch in (2, 4, 8)),
    ]
    return once * 3


def sample_of(probe: Probe, traces: Sequence[Trace]) -> Sample | None:
    """Return the sample that a probe gives. `traces` are the requests sent together, then the late one.
    Return None if the requests did not run in the way that the probe needs.
    """
    together = traces[: len(probe.together)]
    if probe.late_tokens is not None:
        return _mixed(probe, together, traces[-1])
    if probe.answer_tokens == 1:
        return PrefillSample(probe.together[0], together[0].token_s[0] - together[0].sent_s)
    return _decode(probe, together)


def fastest(measured: Mapping[Probe, Sequence[Sample]]) -> list[Sample]:
    """Return the fastest of equal probes, since other work on a machine can only make a probe slower."""
    return [min(samples, key=lambda sample: sample.seconds) for samples in measured.values() if samples]


def _decode(probe: Probe, together: Sequence[Trace]) -> DecodeSample | None:
    """Return the time from when all requests decode until the first request ends."""
    begin = max(trace.token_s[0] for trace in together)
    end = min(trace.token_s[-1] for trace in together)
    times = [time for time in together[0].token_s if begin <= time <= end]
    if len(times) < 3:
        return None
    middle = times[len(times) // 2]
    return DecodeSample(len(together), _context(probe, together, middle), median(_gaps(times)))


def _mixed(probe: Probe, together: Sequence[Trace], late: Trace) -> MixedSample | None:
    """Return the sample of a late prompt, which is computed from the end of the step in which it came."""
    assert probe.late_tokens is not None
    times = together[0].token_s
    begin = next((time for time in times if time > late.sent_s), None)
    end = late.token_s[0]
    if begin is None or times[-1] < end or begin >= end:
        return None
    # The other tokens of the step come at the same moment, apart from delays of the network.
    slack = median(_gaps([time for time in times if time <= begin])) / 2
    steps = sum(begin < time <= end + slack for time in times)
    if steps == 0:
        return None
    context = _context(probe, together, end)
    return MixedSample(probe.late_tokens, len(together), context, steps, end - begin)


def _context(probe: Probe, together: Sequence[Trace], at_s: float) -> float:
    """Return the number of tokens that all requests have at the time `at_s`."""
    answered = sum(time <= at_s for trace in together for time in trace.token_s)
    return float(sum(probe.together) + answered)


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]
