"""Defines the comparison rules: those that combine cache and load into one number, those that use load alone,
those that look for the longest match first, and candidates for our own rule.
"""

from collections import OrderedDict
from statistics import fmean, pstdev

from xxhash import xxh3_64_intdigest

from bench.routing.peer import Asked, LoadRule, Pod, Rule, World
from model_server.core.hashing import BlockHash


class LeastWork(Rule):
    """LPWL: chooses the server with the least sum of its backlog and the request's own work. Among equal sums
    the lower load wins.
    """

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        return self.world.least(
            self.pods,
            lambda pod: pod.backlog_tokens + self.uncached(asked, depths, pod) + pod.in_flight / 1e6,
        )


class LMetric(Rule):
    """Chooses the server with the least product of the request's own uncached tokens and the load."""

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        return self.world.least(
            self.pods, lambda pod: self.uncached(asked, depths, pod) * (pod.in_flight + 1)
        )


class Dynamo(Rule):
    """Chooses the server with the least sum of prefill blocks minus the overlap, plus distinct active blocks.
    The sum includes the blocks of this request.
    """

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        size = self.world.block_tokens

        def key(pod: Pod) -> float:
            prefill = (pod.backlog_tokens + asked.num_tokens) / size - depths[pod.name]
            own = sum(name not in pod.active_blocks for name in asked.names)
            return max(0.0, prefill) + len(pod.active_blocks) + own

        return self.world.least(self.pods, key)


class WeightedSum(Rule):
    """Chooses the server with the greatest 3:2:2 sum of match, queue and KV use. Queue and KV use come from
    scrapes.
    """

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        waiting = {pod.name: pod.page.waiting if pod.page else 0 for pod in self.pods}
        low, high = min(waiting.values()), max(waiting.values())

        def key(pod: Pod) -> float:
            queue = 1.0 if high == low else (high - waiting[pod.name]) / (high - low)
            free = 1 - (pod.page.kv_usage if pod.page else 0.0)
            return -(3 * self.ratio(asked, depths, pod) + 2 * queue + 2 * free)

        return self.world.least(self.pods, key)


class LoadAware(Rule):
    """Chooses the server with the greatest match minus the load above the mean."""

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        mean = fmean(pod.in_flight for pod in self.pods)
        return self.world.least(
            self.pods,
            lambda pod: (pod.in_flight - mean) / max(1.0, mean) - self.ratio(asked, depths, pod),
        )


class AibrixPd(Rule):
    """Chooses by the share of the prompt that does not match and by the load. If loads are far apart, it
    chooses the least load.

    The original counts the running prefills on prefill servers. These servers have no roles, so this rule
    counts all requests in flight.
    """

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        loads = [pod.in_flight for pod in self.pods]
        if max(loads) - min(loads) > 16:
            return self.world.least(self.pods, lambda pod: pod.in_flight)
        return self.world.least(self.pods, lambda pod: self._score(asked, depths, pod))

    def _score(self, asked: Asked, depths: dict[str, int], pod: Pod) -> float:
        most = max(pod.in_flight for pod in self.pods) or 1
        return 10 * (1 - self.ratio(asked, depths, pod)) + pod.in_flight / most


class ExactCost(Rule):
    """Chooses by our score with exact knowledge, in tokens: B + U (w + k L) + c L. By default c is 0.

    With better signals the real picker would make these choices. Of the scores within `near_tie` of the best,
    the one with the most cached tokens wins.
    """

    def __init__(
        self,
        world: World,
        *,
        weight: float = 1.0,
        stall: float = 0.15,
        per_request: float = 0.0,
        near_tie: float = 0.0,
    ) -> None:
        super().__init__(world)
        self._weight, self._stall = weight, stall
        self._per_request, self._near_tie = per_request, near_tie

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        scores = []
        for pod in self.pods:
            own = self.uncached(asked, depths, pod) * (self._weight + self._stall * pod.in_flight)
            scores.append((pod.backlog_tokens + own + self._per_request * pod.in_flight, pod))
        limit = min(score for score, _ in scores) * (1 + self._near_tie)
        ties = [pod for score, pod in scores if score <= limit]
        return self.world.least(ties, lambda pod: -depths[pod.name])


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


class SimHash(LoadRule):
    """Chooses by a 64-bit SimHash of the prompt's segments, so that nearly equal prompts meet."""

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        votes = [0] * 64
        for segment, num_tokens in asked.request.segments:
            word = xxh3_64_intdigest(segment.to_bytes(8, "little"))
            for bit in range(64):
                votes[bit] += num_tokens if word >> bit & 1 else -num_tokens
        return self.pods[sum((vote > 0) << bit for bit, vote in enumerate(votes)) % len(self.pods)]


class HashTrie(Rule):
    """Takes any of the servers with the deepest match, and forgets nothing."""

    index_capacity: float | None = None

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        return self.world.least(self.pods, lambda pod: -depths[pod.name])


class RadixTree(Rule):
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


class Aibrix(Rule):
    """Chooses by match, then by load, among the servers that are not too far above the mean load.

    If the loads are out of balance, only the least loaded servers may match: the most loaded server has over
    2 (mean + 1) requests, and at least 8 more than the least loaded one.
    """

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        loads = [pod.in_flight for pod in self.pods]
        least, most, mean = min(loads), max(loads), fmean(loads)
        limit = mean + pstdev(loads)
        if most > 2 * (mean + 1) and most - least >= 8:
            limit = least
        fit = [pod for pod in self.pods if depths[pod.name] and pod.in_flight <= limit]
        if not fit:
            return self.world.least(self.pods, lambda pod: pod.in_flight)
        return self.world.least(fit, lambda pod: -depths[pod.name] + pod.in_flight / 1e6)


class DeepestHolder(Rule):
    """If the loads are in balance and some server holds more than half of the prompt, chooses the least
    loaded of the servers that hold most of it. Otherwise it chooses the least load.
    """

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        loads = [pod.in_flight for pod in self.pods]
        least, most, deepest = min(loads), max(loads), max(depths.values())
        fit = self.pods
        balanced = most - least <= 32 or most <= int(1.1 * least)
        if balanced and asked.names and deepest / len(asked.names) > 0.5:
            fit = [pod for pod in self.pods if depths[pod.name] == deepest]
        return self.world.least(fit, lambda pod: pod.in_flight)


class LlmdAffinity(Rule):
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
