"""Defines AIBrix's port of Preble, which ranks servers by the requests that they got in the last minutes,
with the costs of a V100.
"""

from __future__ import annotations

from collections import deque

from bench.routing.peer import Asked, Pod, SimpleRule, World

_DECODE_S = 45 * 0.15
"""The decode time of each request: 45 tokens at 0.15 s. The source assumes this until it has measured the
time, which it never does.
"""


class AibrixPreble(SimpleRule):
    """If more than half of the prompt matches, chooses the deepest holder with the fewest recent requests.
    Otherwise it chooses the least recent cost, without this request's own. If the loads are out of balance,
    it considers only the least loaded servers.

    The source records requests and costs by the nodes of its tree. Here each request is its own node.
    """

    def __init__(
        self, world: World, *, threshold: float = 0.5, window_s: float = 180.0, gap: int = 8
    ) -> None:
        super().__init__(world)
        self._threshold, self._window_s, self._gap = threshold, window_s, gap
        self._recent: dict[int, deque[tuple[float, float]]] = {}
        self._new_tokens = 0

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        deepest = max(depths.values()) * self.world.block_tokens
        self._new_tokens = asked.num_tokens - deepest
        loads = [pod.in_flight for pod in self.pods]
        fit = self.pods
        if max(loads) - min(loads) > self._gap:
            fit = [pod for pod in self.pods if pod.in_flight == min(loads)]
        most = max(depths[pod.name] for pod in fit)
        if deepest > self._threshold * asked.num_tokens and most:
            holders = [pod for pod in fit if depths[pod.name] == most]
            return self.world.least(holders, lambda pod: len(self._window(pod, now)))
        return self.world.least(fit, lambda pod: sum(cost_s for _, cost_s in self._window(pod, now)))

    def placed(self, asked: Asked, pod: Pod, *, now: float) -> None:
        total, new = asked.num_tokens, max(1, self._new_tokens)
        cost_s = new / total * prefill_s(new, total) + _DECODE_S
        self._recent.setdefault(pod.bit, deque()).append((now, cost_s))

    def _window(self, pod: Pod, now: float) -> deque[tuple[float, float]]:
        recent = self._recent.setdefault(pod.bit, deque())
        while recent and recent[0][0] <= now - self._window_s:
            recent.popleft()
        return recent


def prefill_s(new: int, total: int) -> float:
    """Return the time by the source's fit of Mistral 7B on a V100: linear layers, attention, and the
    quadratic part.
    """
    linear_ms = 55.0
    if new >= 384:
        linear_ms = 0.27106428 * new + 10.52444263
    elif new >= 192:
        linear_ms = -295 + 3.125 * new - 6.4e-3 * new**2
    attention_ms = 0.8
    if total > 1024:
        attention_ms = (4.65e-4 * total + 0.398) / (2 if new <= 1024 else 1)
    quadratic_ms = -18.425 + 9.65e-3 * new + 5.4e-6 * new**2 if new >= 4096 else 0.0
    return (linear_ms + attention_ms + quadratic_ms) / 1000 / 0.9
