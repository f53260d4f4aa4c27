"""Provides the common parts of all comparison rules: the view of the servers, a prefix index, and the router
that keeps both.

A rule sees what a proxy of its own would see, exactly and at once: its requests in flight, the prompt tokens
that it sent and whose first token has not come, and the servers' pages by scrape. The real picker knows less,
since no first tokens pass it. So the comparison favours the other rules.
"""

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from model_server.core.hashing import BlockHash
from model_server.sim.engine import Snapshot
from model_server.sim.fleet import WAITS
from model_server.sim.prompts import block_names
from model_server.sim.request import SimRequest


@dataclass(slots=True, eq=False)
class Pod:
    """One server as a rule knows it."""

    name: str
    bit: int
    in_flight: int = 0
    """L: the number of requests that were sent there and have not ended."""
    backlog_tokens: int = 0
    """B: the number of uncached prompt tokens that were sent there and whose first token has not come."""
    page: Snapshot | None = None
    active_blocks: Counter[BlockHash] = field(default_factory=Counter)
    """Distinct prompt blocks of requests in flight."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request in a rule's terms."""

    request: SimRequest
    names: list[BlockHash]
    """The names of the prompt's full blocks."""
    num_tokens: int


class Index:
    """Knows which prompt blocks each pod is believed to hold: an LRU for each pod, tails first. If `capacity`
    is None, nothing is evicted.
    """

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity = capacity_blocks
        self._holders: dict[BlockHash, int] = {}
        self._lru: dict[int, OrderedDict[BlockHash, None]] = {}

    def depths(self, names: Sequence[BlockHash], pods: Sequence[Pod]) -> dict[str, int]:
        """Return the number of leading blocks that each pod holds."""
        alive = 0
        for pod in pods:
            alive |= pod.bit
        found, depth = dict.fromkeys((pod.name for pod in pods), 0), 0
        for name in names:
            still = alive & self._holders.get(name, 0)
            if still != alive:
                for pod in pods:
                    if pod.bit & alive & ~still:
                        found[pod.name] = depth
            alive = still
            if not alive:
                break
            depth += 1
        for pod in pods:
            if pod.bit & alive:
                found[pod.name] = depth
        return found

    def record(self, pod: Pod, names: Sequence[BlockHash]) -> None:
        if self._capacity == 0:
            return
        lru = self._lru.setdefault(pod.bit, OrderedDict())
        holders = self._holders
        for name in reversed(names):  # In this order the tail of a prompt becomes its oldest block.
            holders[name] = holders.get(name, 0) | pod.bit
            lru[name] = None
            lru.move_to_end(name)
        while self._capacity is not None and len(lru) > self._capacity:
            self._strike(pod, lru.popitem(last=False)[0])

    def clear(self, pod: Pod) -> None:
        for name in self._lru.pop(pod.bit, OrderedDict()):
            self._strike(pod, name)

    def _strike(self, pod: Pod, name: BlockHash) -> None:
        left = self._holders[name] & ~pod.bit
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]


@dataclass(slots=True)
class World:
    """The settings and facts that a rule gets at its start."""

    rng: random.Random
    block_tokens: int
    capacity_blocks: int
    pods: list[Pod] = field(default_factory=list)

    def least(self, pods: Sequence[Pod], key: Callable[[Pod], float]) -> Pod:
        """Return the pod with the least key. Equal pods are chosen at random."""
        scored = [(key(pod), pod) for pod in pods]
        best = min(score for score, _ in scored)
        return self.rng.choice([pod for score, pod in scored if score == best])


class Rule:
    """A rule that keeps little or nothing between picks."""

    index_capacity: float | None = 1.0
    """The capacity of the index, as a share of a server's cache. None means that nothing is evicted, and 0
    that there is no index.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def pods(self) -> list[Pod]:
        return self.world.pods

    def choose(self, asked: Asked, depths: dict[str, int], *, now: float) -> Pod:
        """Return a pod. `depths` is the number of leading blocks that each pod holds, by the index."""
        raise NotImplementedError

    def placed(self, asked: Asked, pod: Pod, *, now: float) -> None:
        """Note that the request was sent to this pod."""

    def matched(self, asked: Asked, depths: dict[str, int], pod: Pod) -> int:
        """Return the tokens of the prompt that the pod holds. The last token is always computed."""
        size = self.world.block_tokens
        return min(depths[pod.name] * size, (asked.num_tokens - 1) // size * size)

    def ratio(self, asked: Asked, depths: dict[str, int], pod: Pod) -> float:
        return self.matched(asked, depths, pod) / asked.num_tokens

    def uncached(self, asked: Asked, depths: dict[str, int], pod: Pod) -> int:
        return asked.num_tokens - self.matched(asked, depths, pod)


class LoadRule(Rule):
    """Considers no prefix, so no index is kept."""

    index_capacity: float | None = 0.0


@dataclass(slots=True)
class _Sent:
    pod: Pod
    asked: Asked
    uncached: int
    prefilled: bool = False


class PeerRouter:
    """Runs one rule."""

    def __init__(self, rule: Rule, world: World, *, index: Index) -> None:
        self._rule = rule
        self._world = world
        self._index = index
        self._sent: dict[int, _Sent] = {}
        self._bits = 0

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        known = {pod.name: pod for pod in self._world.pods}
        pods = []
        for name in names:
            pod = known.get(name)
            if pod is None or name == restarted:
                if pod is not None:
                    self._index.clear(pod)
                self._bits += 1
                pod = Pod(name, 1 << self._bits)
            pods.append(pod)
        self._world.pods[:] = pods

    def route(self, request: SimRequest, *, now: float) -> str | None:
        world = self._world
        asked = Asked(
            request=request,
            names=block_names(request.segments, block_tokens=world.block_tokens, root=request.adapter),
            num_tokens=request.num_prompt_tokens,
        )
        depths = self._index.depths(asked.names, world.pods)
        pod = self._rule.choose(asked, depths, now=now)
        self._book(asked, pod, depths[pod.name], now)
        self._rule.placed(asked, pod, now=now)
        return pod.name

    def _book(self, asked: Asked, pod: Pod, depth: int, now: float) -> None:
        size = self._world.block_tokens
        cached = min(depth * size, (asked.num_tokens - 1) // size * size)
        sent = _Sent(pod, asked, asked.num_tokens - cached)
        self._sent[asked.request.request_id] = sent
        pod.in_flight += 1
        pod.backlog_tokens += sent.uncached
        pod.active_blocks.update(asked.names)
        self._index.record(pod, asked.names)

    def first_token(self, request_id: int, *, now: float) -> None:
        self._prefilled(self._sent[request_id])

    def _prefilled(self, sent: _Sent) -> None:
        if not sent.prefilled:
            sent.prefilled = True
            sent.pod.backlog_tokens -= sent.uncached

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        sent = self._sent.pop(request_id)
        self._prefilled(sent)
        sent.pod.in_flight -= 1
        active = sent.pod.active_blocks
        for name in sent.asked.names:
            active[name] -= 1
            if not active[name]:
                del active[name]
        if not failed:
            self._index.record(sent.pod, sent.asked.names)

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        for pod in self._world.pods:
            if pod.name == server:
                pod.page = page


class HoldingRouter(PeerRouter):
    """Asks its rule only while some server has room. The queue is first come, first served.

    Dynamo's router holds requests while every server is busy (ai-dynamo/dynamo,
    lib/kv-router/src/scheduling/queue.rs and policy_config.rs at fb5f04b38cf1). A server is busy if it has
    more prefill tokens than a multiple (16 by default) of its tokens per step.
    """

    def __init__(self, rule: Rule, world: World, *, index: Index, busy_tokens: int) -> None:
        super().__init__(rule, world, index=index)
        self._busy_tokens = busy_tokens
        self._held: deque[SimRequest] = deque()

    def route(self, request: SimRequest, *, now: float) -> str | None:
        if self._all_busy():
            self._held.append(request)
            return WAITS
        return super().route(request, now=now)

    def decided(self, *, now: float) -> Iterator[tuple[int, str | None]]:
        while self._held and not self._all_busy():
            request = self._held.popleft()
            yield request.request_id, super().route(request, now=now)

    @property
    def due_s(self) -> float:
        """Return infinity. No time is due, because a server gets room only with a first token or an end."""
        return float("inf")

    def _all_busy(self) -> bool:
        return all(pod.backlog_tokens > self._busy_tokens for pod in self._world.pods)
