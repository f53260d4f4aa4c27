"""Defines comparison rules that look for the longest match first, and use load as a switch, a bound or a
tie-break.
"""

from __future__ import annotations

from collections import OrderedDict
from statistics import fmean, pstdev

from bench.routing.peer import Asked, Pod, SimpleRule, World
from model_server.core.hashing import BlockHash


class RadixTree(SimpleRule):
    """If the loads are in balance and enough of the prompt matches, chooses the server that is recorded at
    the deepest matching node. Otherwise it chooses the least load.
    """

    index_capacity: float | None = 0.0

    def __init__(
        self, world: World, *, threshold: float = 0.3, absolute: int = 64, relative: float = 1.5
    ) -> None:
        super().__init__(world)
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._owners: OrderedDict[BlockHash, Pod] = OrderedDict()

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        loads = [pod.in_flight for pod in self.pods]
        least = self.world.least(self.pods, lambda pod: pod.in_flight)
        if max(loads) - min(loads) > self._absolute and max(loads) > self._relative * min(loads):
            return least
        depth, owner = 0, None
        for name in asked.names:
            found = self._owners.get(name)
            if found is None:
                break
            depth, owner = depth + 1, found
        if owner is None or owner not in self.pods:
            return least
        matched = depth * self.world.block_tokens / asked.num_tokens
        return owner if matched > self._threshold else least

    def placed(self, asked: Asked, pod: Pod, *, now: float) -> None:
        for name in reversed(asked.names):
            self._owners[name] = pod
            self._owners.move_to_end(name)
        while len(self._owners) > self.world.capacity_blocks * len(self.pods):
            self._owners.popitem(last=False)


class Aibrix(SimpleRule):
    """Chooses by match, then by load, among the servers that are not too far above the mean load.

    If the loads are out of balance, only the least loaded servers may match.
    """

    def __init__(self, world: World, *, gap: int = 8, factor: float = 2.0, deviations: float = 1.0) -> None:
        """Out of balance means that the most loaded server has over `factor` (mean + 1) requests, and at
        least `gap` more than the least loaded one.
        """
        super().__init__(world)
        self._gap, self._factor, self._deviations = gap, factor, deviations

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        loads = [pod.in_flight for pod in self.pods]
        least, most, mean = min(loads), max(loads), fmean(loads)
        limit = mean + self._deviations * pstdev(loads)
        if most > self._factor * (mean + 1) and most - least >= self._gap:
            limit = least
        fit = [pod for pod in self.pods if depths[pod.name] and pod.in_flight <= limit]
        if not fit:
            return self.world.least(self.pods, lambda pod: pod.in_flight)
        return self.world.least(fit, lambda pod: -depths[pod.name] + pod.in_flight / 1e6)


class DeepestHolder(SimpleRule):
    """If the loads are in balance and some server holds more than half of the prompt, chooses the least
    loaded of the servers that hold most of it. Otherwise it chooses the least load.
    """

    def __init__(
        self, world: World, *, threshold: float = 0.5, absolute: int = 32, relative: float = 1.1
    ) -> None:
        super().__init__(world)
        self._threshold, self._absolute, self._relative = threshold, absolute, relative

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        loads = [pod.in_flight for pod in self.pods]
        least, most, deepest = min(loads), max(loads), max(depths.values())
        fit = self.pods
        balanced = most - least <= self._absolute or most <= int(self._relative * least)
        if balanced and asked.names and deepest / len(asked.names) > self._threshold:
            fit = [pod for pod in self.pods if depths[pod.name] == deepest]
        return self.world.least(fit, lambda pod: pod.in_flight)


class LlmdAffinity(SimpleRule):
    """Considers the servers that hold most of the prompt, unless their backlog is far behind that of the
    others. Of the considered servers it chooses the one with the least work.

    The work is the tokens in flight plus this request's uncached tokens at that server.
    """

    def __init__(
        self, world: World, *, threshold: float = 0.8, budget_s: float = 18.0, rate: float = 15928.0
    ) -> None:
        super().__init__(world)
        self._threshold, self._budget_s, self._rate = threshold, budget_s, rate

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        holders = [pod for pod in self.pods if self.ratio(asked, depths, pod) >= self._threshold]
        others = [pod for pod in self.pods if pod not in holders]
        if holders and others:
            behind = min(p.backlog_tokens for p in holders) - min(p.backlog_tokens for p in others)
            if behind / self._rate > self._budget_s:
                holders = []
        return self.world.least(
            holders or self.pods, lambda pod: pod.backlog_tokens + self.uncached(asked, depths, pod)
        )
