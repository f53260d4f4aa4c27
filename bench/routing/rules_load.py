"""Defines comparison rules that use load alone, and not the content of the servers' caches."""

from __future__ import annotations

from bench.routing.peer import Asked, LoadRule, Pod, World


class RoundRobin(LoadRule):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._turn = 0

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        self._turn += 1
        return self.pods[self._turn % len(self.pods)]


class LeastLoad(LoadRule):
    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        return self.world.least(self.pods, lambda pod: pod.in_flight)


class PowerOfTwo(LoadRule):
    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        two = self.world.rng.sample(self.pods, min(2, len(self.pods)))
        return self.world.least(two, lambda pod: pod.in_flight)
