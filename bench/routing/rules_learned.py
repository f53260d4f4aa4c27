"""Defines a rule that predicts each server's time to the first token by regression on measured times."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.routing.peer import Asked, Pod, SimpleRule, World

Floats = NDArray[np.float64]
_UNITS: Final = (1.0, 1e-4, 1e-4, 0.1, 1e-5)
"""The units of the features, so that all values are near one: constant, B, U, L, U times L."""
_LONGEST_S: Final = 30.0
"""A longer wait counts as this many seconds."""


class _Server:
    """Fits least squares with forgetting, from one observation after another."""

    __slots__ = ("covariance", "weights")

    def __init__(self, rate: float) -> None:
        self.weights: Floats = np.array([0.0, 1e4 / rate, 1e4 / rate, 0.0, 0.0])
        self.covariance: Floats = np.eye(len(_UNITS))

    def learn(self, features: Floats, seen_s: float, *, forget: float) -> None:
        spread = self.covariance @ features
        gain = spread / (forget + features @ spread)
        self.weights = self.weights + gain * (seen_s - features @ self.weights)
        self.covariance = (self.covariance - np.outer(gain, spread)) / forget
        self.covariance *= min(1.0, 10.0 * len(_UNITS) / float(np.trace(self.covariance)))


class Learned(SimpleRule):
    """Chooses the least expected time to the first token, as learned from each server's first tokens. One
    request in fifty goes to a random server.

    After Lodestar (arXiv 2606.00946), but smaller: Lodestar's predictor is a network that is trained every
    few seconds. This predictor is linear and learns from each first token. The reward is a shorter TTFT.
    """

    def __init__(
        self, world: World, *, explore: float = 0.02, forget: float = 0.995, rate: float = 8000.0
    ) -> None:
        super().__init__(world)
        self._explore, self._forget, self._rate = explore, forget, rate
        self._servers: dict[int, _Server] = {}
        self._waiting: dict[int, tuple[_Server, Floats, float]] = {}
        self._chosen: Floats = np.array(_UNITS)

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        seen = {pod.name: self._features(asked, depths, pod) for pod in self.pods}
        if self.world.rng.random() < self._explore:
            pod = self.world.rng.choice(self.pods)
        else:
            pod = self.world.least(
                self.pods, lambda pod: max(0.0, float(seen[pod.name] @ self._server(pod).weights))
            )
        self._chosen = seen[pod.name]
        return pod

    def placed(self, asked: Asked, pod: Pod, *, now: float) -> None:
        self._waiting[asked.request.request_id] = (self._server(pod), self._chosen, now)

    def first_token(self, request_id: int, *, now: float) -> None:
        server, features, sent_s = self._waiting.pop(request_id)
        server.learn(features, min(now - sent_s, _LONGEST_S), forget=self._forget)

    def _server(self, pod: Pod) -> _Server:
        return self._servers.setdefault(pod.bit, _Server(self._rate))

    def _features(self, asked: Asked, depths: dict[str, int], pod: Pod) -> Floats:
        uncached, load = self.uncached(asked, depths, pod), pod.in_flight
        raw = (1.0, pod.backlog_tokens, uncached, load, uncached * load)
        return np.array([value * unit for value, unit in zip(raw, _UNITS, strict=True)])
