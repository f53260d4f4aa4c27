"""Estimates how fast the recorded servers were, and the lengths of answers that were not measured. The
simulated servers use these costs. Pure.

Only sampled answers have a recorded length and first token. The length of all others is estimated from their
time. The time of a step that only decodes is never recorded alone: the time of a token also includes stalls
by prefills and the other requests in the batch, which the simulator's cost model adds by itself. So their
means over the recording are subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from epp.observe.recording.lines import RecordedRequest
from epp.tools.replay.trace import RecordedServer, quantile
from model_server.runners.cost import CostModel

_ASSUMED_TPOT_S: Final = 0.02
_MOST_OUTPUT_TOKENS: Final = 16_384
_MOST_RECORDED_TOKENS: Final = 2**18
"""Bound of the length that an answer reports. Each token is a step of a simulated server."""
_LEAST_STEP_S: Final = 0.001
_MOST_BUSY: Final = 0.9
_COSTS: Final = CostModel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tempo:
    ttft_s: float
    """Median of the sampled answers. 0: there are none."""
    tpot_s: float
    """Seconds for each further token, also the median of the sampled answers."""
    decode_step_s: float | None
    """None: no sampled answer shows it."""
    prefill_ratio: float
    """The rate at the start of a prompt on an otherwise idle server, divided by the rate that the picker
    learned. The learned rate holds in the middle of prompts, while other requests decode.
    """
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, requests: Sequence[RecordedRequest], servers: Sequence[RecordedServer]) -> Tempo:
        ttfts = sorted(a.ttft_s for a in requests if a.ttft_s is not None)
        tpots = tpots_s(requests)
        recorded = sum(a.output_tokens is not None for a in requests)
        return cls(
            ttft_s=quantile(ttfts, 0.5),
            tpot_s=quantile(tpots, 0.5) or _ASSUMED_TPOT_S,
            decode_step_s=_step_s(requests, servers, fmean(tpots)) if tpots and servers else None,
            prefill_ratio=(1 + _middle_tokens(requests) / _COSTS.context_knee_tokens)
            * (1 + _COSTS.interference),
            remarks=() if recorded == len(requests) else (_guess_of(recorded, len(requests), bool(tpots)),),
        )

    def output_tokens(self, asked: RecordedRequest) -> int:
        """Return the length of an answer, as the server reported it, or estimated from the time that the
        answer took.
        """
        if asked.output_tokens is not None:
            return max(1, min(_MOST_RECORDED_TOKENS, asked.output_tokens))
        return min(_MOST_OUTPUT_TOKENS, max(1, round((asked.ended_s - self.ttft_s) / self.tpot_s)))


def tpots_s(requests: Sequence[RecordedRequest]) -> list[float]:
    """Return the seconds for each token after the first, of all answers with these times, in ascending
    order.
    """
    return sorted(
        (a.ended_s - a.ttft_s) / (a.output_tokens - 1)
        for a in requests
        if a.ttft_s is not None
        and a.output_tokens is not None
        and a.output_tokens > 1
        and a.ended_s > a.ttft_s
    )


def _step_s(requests: Sequence[RecordedRequest], servers: Sequence[RecordedServer], tpot_s: float) -> float:
    """Return the seconds of a decode step, from means over the recording: how much of the time went to
    prefills, and how many requests were in a batch.
    """
    lasted_s = max(a.at_unix_s + a.ended_s for a in requests) - min(a.at_unix_s for a in requests)
    computed = sum(a.prompt_tokens - a.matched_tokens for a in requests)
    rate = sum(server.prefill_tokens_per_s for server in servers)
    busy = min(_MOST_BUSY, computed / rate / lasted_s)
    batch = sum(a.ended_s for a in requests) / lasted_s / len(servers)
    context = fmean(a.prompt_tokens for a in requests)
    each_s = _COSTS.decode_per_request_s + _COSTS.decode_per_context_token_s * context
    return max(_LEAST_STEP_S, tpot_s * (1 - busy) - max(0.0, batch - 1) * each_s)


def _middle_tokens(requests: Sequence[RecordedRequest]) -> float:
    """Return the average position of a computed token in its prompt."""
    computed = [
        (a.prompt_tokens - a.matched_tokens, (a.prompt_tokens + a.matched_tokens) / 2) for a in requests
    ]
    total = sum(tokens for tokens, _ in computed)
    return sum(tokens * middle for tokens, middle in computed) / total if total else 0.0


def _guess_of(recorded: int, count: int, known_tempo: bool) -> str:  # noqa: FBT001 - one caller
    guessed = f"at a guessed {_ASSUMED_TPOT_S * 1000:.0f} ms a token"
    by = "by the speed of the sampled answers" if known_tempo else guessed
    return (
        f"{recorded} of {count} answers have a recorded length; the lengths of the others are estimated from how long they took, {by} "
        "(spec.sampling.share of the policy says how many are sampled)"
    )
