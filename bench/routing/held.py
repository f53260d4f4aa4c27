"""Puts a queue in front of a comparison rule: Dynamo's router holds requests while every server is busy.

Source: ai-dynamo/dynamo lib/kv-router/src/scheduling/queue.rs and policy_config.rs at fb5f04b38cf1. A server
is busy if it has more prefill tokens than a multiple (16 by default) of its tokens per step. The queue is
first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from bench.routing.peer import Index, PeerRouter, Rule, World
from model_server.sim.fleet import WAITS
from model_server.sim.request import SimRequest


class HoldingRouter(PeerRouter):
    """Asks its rule only while some server has room."""

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
