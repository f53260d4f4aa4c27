"""Makes a load that rises and falls: the requests of a workload, at a rate that changes over time. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.routing.workloads import Timed
from model_server.sim.request import Record, SimRequest

_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second at this time. Between two such times the rate changes linearly."""

    at_s: float
    per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A low load that rises to a peak, stays there for a while, falls, and stays low."""

    calm_per_s: float
    peak_per_s: float
    calm_s: float
    rise_s: float
    peak_s: float
    fall_s: float
    end_s: float
    """How long the load stays low after the fall."""

    def rates(self) -> list[Rate]:
        rates = [Rate(0.0, self.calm_per_s)]
        for seconds, per_s in (
            (self.calm_s, self.calm_per_s),
            (self.rise_s, self.peak_per_s),
            (self.peak_s, self.peak_per_s),
            (self.fall_s, self.calm_per_s),
            (self.end_s, self.calm_per_s),
        ):
            rates.append(Rate(rates[-1].at_s + seconds, per_s))
        return rates

    @property
    def lasts_s(self) -> float:
        return self.calm_s + self.rise_s + self.peak_s + self.fall_s + self.end_s

    @property
    def requests(self) -> int:
        """Return an upper estimate of the number of requests."""
        rates = self.rates()
        sure = sum(
            (later.at_s - one.at_s) * (one.per_s + later.per_s) / 2
            for one, later in itertools.pairwise(rates)
        )
        return int(sure + 5 * sure**0.5) + 10


def rate_at(rates: Sequence[Rate], at_s: float) -> float:
    for one, later in itertools.pairwise(rates):
        if one.at_s <= at_s < later.at_s:
            return one.per_s + (later.per_s - one.per_s) * (at_s - one.at_s) / (later.at_s - one.at_s)
    return 0.0


class Demand:
    """The fleet's workload. Arrivals do not depend on earlier requests."""

    def __init__(self, timed: Sequence[Timed], rates: Sequence[Rate]) -> None:
        """Take requests whose gaps have a mean of 1. The gaps become shorter as the rate rises."""
        self._timed = timed
        self._rates = rates

    def start(self) -> Iterator[tuple[float, SimRequest]]:
        requests = iter(self._timed)
        request = next(requests, None)
        due = request.gap if request else 0.0
        done = at_s = 0.0
        while request is not None and at_s < self._rates[-1].at_s:
            per_s = rate_at(self._rates, at_s + _STEP_S / 2)
            while request is not None and due <= done + per_s * _STEP_S:
                yield at_s + (due - done) / per_s, request.request
                request = next(requests, None)
                due += request.gap if request else 0.0
            done += per_s * _STEP_S
            at_s += _STEP_S

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        return ()
