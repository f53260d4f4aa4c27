"""Computes the number of servers from one value of a metric, as Kubernetes's HorizontalPodAutoscaler does.
Pure.

It follows the controller (kubernetes v1.36.3, `pkg/controller/podautoscaler`): `getUsageRatioReplicaCount` in
`replica_calculator.go` for a metric with a target of type Value, which is what KEDA sets for
`metricType: Value`; `stabilizeRecommendationWithBehaviors` and `convertDesiredReplicasWithBehaviorRate` in
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
    """The largest change within a period."""

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
    _advised: list[tuple[float, int]] = field(default_factory=list)
    _added: list[tuple[float, int]] = field(default_factory=list)
    _removed: list[tuple[float, int]] = field(default_factory=list)

    def servers(self, value: float | None, *, now_there: int, ready: int, now: float) -> int:
        """Return the wanted number of servers. `now_there` servers were requested, and `ready` of them
        already serve. `value` is the metric, or None if it is unknown.
        """
        if value is None:
            return now_there
        wanted = self._steady(self._advice(value, now_there, ready), now_there, now)
        count = self._paced(wanted, now_there, now)
        if count != now_there:
            (self._added if count > now_there else self._removed).append((now, abs(count - now_there)))
        return count

    def _advice(self, value: float, now_there: int, ready: int) -> int:
        ratio = value / self.target
        count = now_there if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * ready)
        return min(self.most, max(self.least, count))

    def _steady(self, advice: int, now_there: int, now: float) -> int:
        """Return the number of servers after the stabilization windows: a rise goes at most to the smallest
        advice of the window for rises, and a fall at most to the largest advice of the window for falls.
        """
        behaviour = self.behaviour
        if not self._advised:
            self._advised.append((now, now_there))
        self._advised.append((now, advice))
        longest_s = max(behaviour.up_window_s, behaviour.down_window_s)
        self._advised = [(at, count) for at, count in self._advised if at >= now - longest_s]
        up = min(count for at, count in self._advised if at >= now - behaviour.up_window_s)
        down = max(count for at, count in self._advised if at >= now - behaviour.down_window_s)
        return min(max(now_there, up), down)

    def _paced(self, wanted: int, now_there: int, now: float) -> int:
        if wanted > now_there:
            limits = [
                _after(pace, self._at_start(pace, now_there, now), sign=1) for pace in self.behaviour.up
            ]
            return min(wanted, max(now_there, *limits), self.most)
        limits = [_after(pace, self._at_start(pace, now_there, now), sign=-1) for pace in self.behaviour.down]
        return max(wanted, min(now_there, *limits), self.least)

    def _at_start(self, pace: Pace, now_there: int, now: float) -> int:
        """Return the number of servers when the pace's period began."""
        since = now - pace.period_s
        added = sum(count for at, count in self._added if at > since)
        removed = sum(count for at, count in self._removed if at > since)
        return now_there - added + removed


def _after(pace: Pace, count: int, *, sign: int) -> int:
    if pace.kind == "Pods":
        return count + sign * int(pace.value)
    return math.ceil(count * (1 + pace.value / 100)) if sign > 0 else int(count * (1 - pace.value / 100))
