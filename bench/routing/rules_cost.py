"""Defines comparison rules that combine cache and load into one number, and candidates for our own rule."""

from __future__ import annotations

from statistics import fmean

from bench.routing.peer import Asked, Pod, SimpleRule, World


class LeastWork(SimpleRule):
    """LPWL: chooses the server with the least sum of its backlog and the request's own work. Among equal sums
    the lower load wins.
    """

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        return self.world.least(
            self.pods,
            lambda pod: pod.backlog_tokens + self.uncached(asked, depths, pod) + pod.in_flight / 1e6,
        )


class LMetric(SimpleRule):
    """Chooses the server with the least product of the request's own uncached tokens and the load. The
    variant adds the backlog to the tokens.
    """

    def __init__(self, world: World, *, with_backlog: bool = False) -> None:
        super().__init__(world)
        self._with_backlog = with_backlog

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        def key(pod: Pod) -> float:
            backlog = pod.backlog_tokens if self._with_backlog else 0
            return (backlog + self.uncached(asked, depths, pod)) * (pod.in_flight + 1)

        return self.world.least(self.pods, key)


class Dynamo(SimpleRule):
    """Chooses the server with the least sum of prefill blocks minus the overlap, plus distinct active blocks.
    The sum includes the blocks of this request.
    """

    def __init__(self, world: World, *, scale: float = 1.0, load_weight: float = 0.0) -> None:
        """`scale` is Dynamo's `prefill_load_scale`, the setting that Dynamo's documents name. Dynamo refuses
        a credit above 1.
        """
        super().__init__(world)
        self._scale, self._load_weight = scale, load_weight

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        size = self.world.block_tokens

        def key(pod: Pod) -> float:
            prefill = (pod.backlog_tokens + asked.num_tokens) / size - depths[pod.name]
            own = sum(name not in pod.active_blocks for name in asked.names)
            return (
                self._scale * max(0.0, prefill)
                + len(pod.active_blocks)
                + own
                + self._load_weight * pod.in_flight
            )

        return self.world.least(self.pods, key)


class WeightedSum(SimpleRule):
    """Chooses the server with the greatest 3:2:2 sum of match, queue and KV use. Queue and KV use come from
    scrapes.
    """

    def __init__(self, world: World, *, prefix: float = 3.0, queue: float = 2.0, kv: float = 2.0) -> None:
        super().__init__(world)
        self._prefix, self._queue, self._kv = prefix, queue, kv

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        waiting = {pod.name: pod.page.waiting if pod.page else 0 for pod in self.pods}
        low, high = min(waiting.values()), max(waiting.values())

        def key(pod: Pod) -> float:
            queue = 1.0 if high == low else (high - waiting[pod.name]) / (high - low)
            free = 1 - (pod.page.kv_usage if pod.page else 0.0)
            return -(self._prefix * self.ratio(asked, depths, pod) + self._queue * queue + self._kv * free)

        return self.world.least(self.pods, key)


class LoadAware(SimpleRule):
    """Chooses the server with the greatest match minus the load above the mean."""

    def __init__(self, world: World, *, beta: float = 1.0) -> None:
        super().__init__(world)
        self._beta = beta

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        mean = fmean(pod.in_flight for pod in self.pods)
        return self.world.least(
            self.pods,
            lambda pod: self._beta * (pod.in_flight - mean) / max(1.0, mean) - self.ratio(asked, depths, pod),
        )


class AibrixPd(SimpleRule):
    """Chooses by the share of the prompt that does not match and by the load. If loads are far apart, it
    chooses the least load.

    The original counts the running prefills on prefill servers. These servers have no roles, so this rule
    counts all requests in flight.
    """

    def __init__(self, world: World, *, gap: int = 16) -> None:
        super().__init__(world)
        self._gap = gap

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        loads = [pod.in_flight for pod in self.pods]
        if max(loads) - min(loads) > self._gap:
            return self.world.least(self.pods, lambda pod: pod.in_flight)
        return self.world.least(self.pods, lambda pod: self._score(asked, depths, pod))

    def _score(self, asked: Asked, depths: dict[str, int], pod: Pod) -> float:
        most = max(pod.in_flight for pod in self.pods) or 1
        return 10 * (1 - self.ratio(asked, depths, pod)) + pod.in_flight / most


class ExactCost(SimpleRule):
    """Chooses by our score with exact knowledge, in tokens: B + U (w + k L) + c L.

    With better signals the real picker would make these choices. Of the scores within `near_tie` of the best,
    the one with the most cached tokens wins.
    """

    def __init__(
        self,
        world: World,
        *,
        weight: float = 1.0,
        stall: float = 0.15,
        per_request: float = 50.0,
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
