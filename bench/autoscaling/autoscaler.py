"""Computes the number of servers from one value of a metric, as Kubernetes's HorizontalPodAutoscaler does.
Pure.

It follows the controller (kubernetes v1.36.3, `pkg/controller/podautoscaler`): `getUsageRatioReplicaCount` in
`replica_calculator.go` for a metric with a target of type Value (KEDA sets this type for `metricType:
Value`); `stabilizeRecommendationWithBehaviors` and `convertDesiredReplicasWithBehaviorRate` in
`horizontal.go` for `behavior`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

TOLERANCE = 0.1
"""If a value differs from its target by at most this share, nothing changes."""
SYNC_S = 15.0
"""Time between two decisions of the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The largest change within a period, as one policy of an HPA's `behavior` states it."""

    kind: Literal["Pods", "Percent"]
    value: float
    period_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """The limits to how fast the number of servers may change. The defaults are those of the chart
    model-server. If there are several paces, the fastest counts.
    """

    up_window_s: float = 0.0
    up: Sequence[Pace] = (
        Pace(kind="Percent", value=50, period_s=60),
        Pace(kind="Pods", value=1, period_s=60),
    )
    down_window_s: float = 600.0
    down: Sequence[Pace] = (Pace(kind="Pods", value=1, period_s=300),)


@dataclass(slots=True, kw_only=True)
class Autoscaler:
    target: float
    least: int
    most: int
    behaviour: Behaviour = field(default_factory=Behaviour)
    _recommendations: list[tuple[float, int]] = field(default_factory=list)
    _added: list[tuple[float, int]] = field(default_factory=list)
    _removed: list[tuple[float, int]] = field(default_factory=list)

    def servers(self, value: float | None, *, requested: int, ready: int, now: float) -> int:
        """Return the wanted number of servers. `requested` is the number that was requested last, and `ready`
        is the number that already serve. `value` is the metric, or None if it is unknown.
        """
        if value is None:
            return requested
        wanted = self._stabilized(self._recommended(value, requested, ready), requested, now)
        count = self._paced(wanted, requested, now)
        if count != requested:
            (self._added if count > requested else self._removed).append((now, abs(count - requested)))
        return count

    def _recommended(self, value: float, requested: int, ready: int) -> int:
        ratio = value / self.target
        count = requested if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * ready)
        return min(self.most, max(self.least, count))

    def _stabilized(self, recommended: int, requested: int, now: float) -> int:
        """Return the number of servers after the stabilization windows: a rise goes at most to the smallest
        recommendation of the window for rises, and a fall at most to the largest recommendation of the window
        for falls.
        """
        behaviour = self.behaviour
        if not self._recommendations:
            self._recommendations.append((now, requested))
        self._recommendations.append((now, recommended))
        longest_s = max(behaviour.up_window_s, behaviour.down_window_s)
        self._recommendations = [(at, n) for at, n in self._recommendations if at >= now - longest_s]
        up = min(n for at, n in self._recommendations if at >= now - behaviour.up_window_s)
        down = max(n for at, n in self._recommendations if at >= now - behaviour.down_window_s)
        return min(max(requested, up), down)

    def _paced(self, wanted: int, requested: int, now: float) -> int:
        if wanted > requested:
            limits = [
                _after(pace, self._at_start(pace, requested, now), sign=1) for pace in self.behaviour.up
            ]
            return min(wanted, max(requested, *limits), self.most)
        limits = [_after(pace, self._at_start(pace, requested, now), sign=-1) for pace in self.behaviour.down]
        return max(wanted, min(requested, *limits), self.least)

    def _at_start(self, pace: Pace, requested: int, now: float) -> int:
        """Return the number of servers when the pace's period began."""
        since = now - pace.period_s
        added = sum(count for at, count in self._added if at > since)
        removed = sum(count for at, count in self._removed if at > since)
        return requested - added + removed


def _after(pace: Pace, count: int, *, sign: int) -> int:
    if pace.kind == "Pods":
        return count + sign * int(pace.value)
    return math.ceil(count * (1 + pace.value / 100)) if sign > 0 else int(count * (1 - pace.value / 100))
