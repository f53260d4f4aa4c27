"""Defines comparison rules that use load, sessions or a hash of the prompt's start, and not the content of
the servers' caches.
"""

from __future__ import annotations

import bisect
from collections import Counter

from xxhash import xxh3_64_intdigest

from bench.routing.peer import Asked, LoadRule, Pod, World


class Chance(LoadRule):
    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        return self.world.rng.choice(self.pods)


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


class Ring:
    """A ring for consistent hashing: each server owns the arcs that end at its virtual nodes."""

    def __init__(self, *, virtual_nodes: int) -> None:
        self._virtual_nodes = virtual_nodes
        self._names: tuple[str, ...] = ()
        self._points: list[tuple[int, str]] = []

    def walk(self, key: int, pods: list[Pod]) -> list[Pod]:
        """Return the servers in the order in which the ring meets them, from `key` on."""
        names = tuple(pod.name for pod in pods)
        if names != self._names:
            self._names = names
            self._points = sorted(
                (xxh3_64_intdigest(f"{name}#{n}".encode()), name)
                for name in names
                for n in range(self._virtual_nodes)
            )
        by_name = {pod.name: pod for pod in pods}
        start = bisect.bisect_left(self._points, (key, ""))
        order: dict[str, Pod] = {}
        for step in range(len(self._points)):
            name = self._points[(start + step) % len(self._points)][1]
            if name not in order:
                order[name] = by_name[name]
                if len(order) == len(by_name):
                    break
        return list(order.values())


class Session(LoadRule):
    """Chooses by the session's position on the ring. A request without a session goes to the server with the
    fewest recent arrivals a second.
    """

    def __init__(self, world: World, *, window_s: float = 60.0) -> None:
        super().__init__(world)
        self._window_s = window_s
        self._ring = Ring(virtual_nodes=160)

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        if asked.session:
            return self._ring.walk(xxh3_64_intdigest(asked.session.encode()), self.pods)[0]
        since = now - self._window_s
        return self.world.least(self.pods, lambda pod: sum(1 for _ in pod.recent(since=since)))


class SimHash(LoadRule):
    """Chooses by a 64-bit SimHash over the prompt's words, which should send near-equal prompts to the same
    server. The text repeats one word within a segment. So its shingles are the segments, weighted by their
    lengths.
    """

    def __init__(self, world: World, *, virtual_nodes: int = 256) -> None:
        super().__init__(world)
        self._ring = Ring(virtual_nodes=virtual_nodes)

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        votes = Counter[int]()
        for segment_id, num_tokens in asked.request.segments:
            word = xxh3_64_intdigest(segment_id.to_bytes(8, "little"))
            for bit in range(64):
                votes[bit] += num_tokens if word >> bit & 1 else -num_tokens
        value = sum(1 << bit for bit in range(64) if votes[bit] > 0)
        return self._ring.walk(value, self.pods)[0]


class BoundedLoads(LoadRule):
    """CHWBL: chooses by the ring position of the first user text, and skips servers over their share of the
    load.
    """

    def __init__(self, world: World, *, num_chars: int = 100, bound: float = 1.25) -> None:
        super().__init__(world)
        self._num_chars, self._bound = num_chars, bound
        self._ring = Ring(virtual_nodes=256)

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        limit = self._bound * (sum(pod.in_flight for pod in self.pods) + 1) / len(self.pods)
        order = self._ring.walk(asked.user_head(num_chars=self._num_chars), self.pods)
        return next((pod for pod in order if pod.in_flight <= limit), order[0])
