"""Computes the cost of an item by the length of its answer, and the length up to which the cache reaches a
wanted gain. Pure: no torch.

An item with an answer of a tokens takes P + (a - 1) D seconds: P for its first token, D for each further
token. The cache changes only P. So its gain, (P without + (a - 1) D) / (P with + (a - 1) D), falls towards 1
as answers grow. The rows of `report_rows` call this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCosts:
    """The seconds of an item."""

    first_with_s: float
    first_without_s: float
    further_s: float

    def gain(self, answer_tokens: float) -> float:
        further_s = (answer_tokens - 1) * self.further_s
        return (self.first_without_s + further_s) / (self.first_with_s + further_s)

    def longest_for(self, gain: float) -> float:
        """Return the longest answer, in tokens, with which the cache gains this much. A value under 1 means
        that no answer reaches this gain.
        """
        rest_s = (self.first_without_s - gain * self.first_with_s) / (gain - 1)
        return 1 + rest_s / self.further_s


def fit(points: Sequence[tuple[int, float, float]]) -> AnswerCosts:
    """Fit two lines with the same slope to (answer tokens, seconds of an item with the cache, without it),
    by least squares.
    """
    further = [answer - 1 for answer, _, _ in points]
    mean = fmean(further)
    spread = 2 * sum((x - mean) ** 2 for x in further)
    slope = sum((x - mean) * (a + b) for x, (_, a, b) in zip(further, points, strict=True)) / spread
    return AnswerCosts(
        first_with_s=fmean(s for _, s, _ in points) - slope * mean,
        first_without_s=fmean(s for _, _, s in points) - slope * mean,
        further_s=slope,
    )
