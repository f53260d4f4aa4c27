"""Comparison rules that put cache and load into one number, and the candidates for our own rule."""

from __future__ import annotations

from statistics import fmean

from tests.bench.routing.peer import Asked, Pod, SimpleRule, World, prefill_work


class LeastWork(SimpleRule):
    """LPWL: backlog and own work, ties by load."""

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        return self.world.least(
            self.pods,
            lambda pod: pod.backlog_tokens + self.uncached(asked, depths, pod) + pod.in_flight / 1e6,
        )


class LMetric(SimpleRule):
    """Own uncached tokens times load; the variant adds the backlog to them."""

    def __init__(self, world: World, *, with_backlog: bool = False) -> None:
        super().__init__(world)
        self._with_backlog = with_backlog

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        def key(pod: Pod) -> float:
            backlog = pod.backlog_tokens if self._with_backlog else 0
            return (backlog + self.uncached(asked, depths, pod)) * (pod.in_flight + 1)

        return self.world.least(self.pods, key)


class Dynamo(SimpleRule):
    """Prefill blocks less credited overlap, and distinct active blocks, this request's included."""

    def __init__(
        self, world: World, *, scale: float = 1.0, credit: float = 1.0, load_weight: float = 0.0
    ) -> None:
        super().__init__(world)
        self._scale, self._credit, self._load_weight = scale, credit, load_weight

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        size = self.world.block_tokens

        def key(pod: Pod) -> float:
            prefill = (pod.backlog_tokens + asked.num_tokens) / size - self._credit * depths[pod.name]
            own = sum(name not in pod.active_blocks for name in asked.names)
            return (
                self._scale * max(0.0, prefill)
                + len(pod.active_blocks)
                + own
                + self._load_weight * pod.in_flight
            )

        return self.world.least(self.pods, key)


class WeightedSum(SimpleRule):
    """3:2:2 of match, queue and KV use, the latter two as scraped."""

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
    """Match less the load above the mean."""

    def __init__(self, world: World, *, beta: float = 1.0) -> None:
        super().__init__(world)
        self._beta = beta

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        mean = fmean(pod.in_flight for pod in self.pods)
        return self.world.least(
            self.pods,
            lambda pod: self._beta * (pod.in_flight - mean) / max(1.0, mean) - self.ratio(asked, depths, pod),
        )


class PredictedTtft(SimpleRule):
    """Undone prefill work and own, where a token's work grows with its position."""

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        return self.world.least(
            self.pods,
            lambda pod: pod.backlog_work + prefill_work(self.matched(asked, depths, pod), asked.num_tokens),
        )


class AibrixPd(SimpleRule):
    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        most = max(pod.in_flight for pod in self.pods) or 1
        return self.world.least(
            self.pods, lambda pod: 10 * (1 - self.ratio(asked, depths, pod)) + pod.in_flight / most
        )


class Conductor(SimpleRule):
    """Load times the mean prefill, the transfer of what matches, and the prefill of what does not, in ms."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._mean_ms = 200.0

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        def key(pod: Pod) -> float:
            transfer = 0.005 * self.matched(asked, depths, pod) + 1
            return pod.in_flight * self._mean_ms + transfer + self._prefill_ms(asked, depths, pod)

        chosen = self.world.least(self.pods, key)
        self._mean_ms += 0.05 * (self._prefill_ms(asked, depths, chosen) - self._mean_ms)
        return chosen

    def _prefill_ms(self, asked: Asked, depths: dict[str, int], pod: Pod) -> float:
        return float(0.001 * self.uncached(asked, depths, pod) ** 1.5 + 5)


class Mooncake(SimpleRule):
    """Least predicted TTFT: queue and own prefill by a fitted model of prefill time; no transfers between servers."""

    def __init__(self, world: World, *, rate: float = 8000.0, knee_tokens: float = 32768.0) -> None:
        super().__init__(world)
        self._rate, self._knee_tokens = rate, knee_tokens

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        def key(pod: Pod) -> float:
            cached = self.matched(asked, depths, pod)
            tokens = pod.backlog_tokens + asked.num_tokens - cached
            work = pod.backlog_work + prefill_work(cached, asked.num_tokens)
            return (tokens + work / self._knee_tokens) / self._rate

        return self.world.least(self.pods, key)


class ExactCost(SimpleRule):
    """Our score with exact knowledge: B + w U + c L in tokens. What the real picker could reach with better signals.

    adaptive: w = 1 + mean backlog / typical own work, so that cache counts for more the longer the queues are.
    """

    def __init__(
        self,
        world: World,
        *,
        weight: float = 3.0,
        per_request: float = 120.0,
        near_tie: float = 0.05,
        adaptive: bool = False,
        most_weight: float = 8.0,
        one_copy: bool = False,
    ) -> None:
        super().__init__(world)
        self._weight, self._per_request, self._near_tie = weight, per_request, near_tie
        self._adaptive, self._most_weight = adaptive, most_weight
        self._one_copy = one_copy
        self._typical = 1000.0
        self._copying: dict[bytes, tuple[Pod, float]] = {}

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        weight = self._weight
        if self._adaptive:
            backlog = fmean(pod.backlog_tokens for pod in self.pods)
            weight = min(self._most_weight, 1 + backlog / self._typical)
        scores = [
            (
                pod.backlog_tokens
                + weight * self.uncached(asked, depths, pod)
                + self._per_request * pod.in_flight,
                pod,
            )
            for pod in self.pods
        ]
        limit = min(score for score, _ in scores) * (1 + self._near_tie)
        ties = [pod for score, pod in scores if score <= limit]
        chosen = self.world.least(ties, lambda pod: -depths[pod.name])
        self._typical += 0.02 * (self.uncached(asked, depths, chosen) - self._typical)
        if self._one_copy:
            chosen = self._joined(asked, depths, chosen, now)
        return chosen

    def _joined(self, asked: Asked, depths: dict[str, int], chosen: Pod, now: float) -> Pod:
        """A copy of a prefix that some server holds is made by one server at a time: who would copy too, joins it."""
        deepest = max(depths.values())
        if deepest - depths[chosen.name] < 2048 / self.world.block_tokens:
            return chosen
        prefix = asked.names[deepest - 1]
        making = self._copying.get(prefix)
        if making is not None and now < making[1] and making[0] in self.pods:
            return self.world.least(
                [making[0], *[p for p in self.pods if depths[p.name] == deepest]],
                lambda pod: pod.backlog_tokens + self._per_request * pod.in_flight,
            )
        copied = (deepest - depths[chosen.name]) * self.world.block_tokens
        self._copying[prefix] = (chosen, now + (chosen.backlog_tokens + copied) / 8000)
        return chosen
