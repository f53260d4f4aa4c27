"""Keeps a histogram of positive numbers. Every quantile is within half a percent, and histograms can be added
up over processes.

`recorder` calls it for each answer, and `health` for each wake-up of the event loop. Zero and negative
numbers count as a millionth, the least value that the histogram can represent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

_STEP: Final = math.log(1.01)
_LEAST: Final = 1e-6


class Samples:
    """Counts in buckets of one percent. Sum, least and largest value are exact."""

    __slots__ = ("_buckets", "count", "least", "most", "total")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = -math.inf
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        bucket = round(math.log(max(_LEAST, value)) / _STEP)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def merge(self, other: Samples) -> None:
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    @property
    def mean(self) -> float:
        """Return the mean, or nan if there are no values."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """Return the least value that a `share` of all values do not exceed. Without values it is nan."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count))
        for value, below in self.curve():
            if below * self.count >= rank - 0.5:
                return value
        return self.most

    def curve(self) -> list[tuple[float, float]]:
        """Return pairs (value, share of all values that do not exceed it), in ascending order."""
        points = []
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            value = math.exp(bucket * _STEP)
            points.append((min(max(value, self.least), self.most), seen / self.count))
        if points:
            points[-1] = (self.most, 1.0)
        return points

    def document(self) -> dict[str, Any]:
        """Return the samples for JSON, and for locust's messages between its processes."""
        if not self.count:
            return {}
        return {
            "count": self.count,
            "total": self.total,
            "least": self.least,
            "most": self.most,
            "buckets": [[bucket, self._buckets[bucket]] for bucket in sorted(self._buckets)],
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Samples:
        made = cls()
        if document:
            made._buckets = {int(bucket): int(count) for bucket, count in document["buckets"]}
            made.count = document["count"]
            made.total = document["total"]
            made.least = document["least"]
            made.most = document["most"]
        return made

    def check_integrity(self) -> None:
        assert self.count == sum(self._buckets.values())
        assert all(count > 0 for count in self._buckets.values())
        assert self.count == 0 or self.least <= self.mean * (1 + 1e-9) <= self.most * (1 + 2e-9)
