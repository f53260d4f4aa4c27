"""Requests that wait because no server of their model is ready, as in a pool that was scaled to zero.

The gate holds a request here in place of its 503, for as long as the policy's `flow.waitForServerSeconds`.
When a server is ready, the requests go in the order of their arrival. Synchronous, without a clock.

Invariant: each request that is held leaves, or its `Answer` is called once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection
from math import inf
from typing import Final

from msgspec import Struct

from epp.base.errors import FlowRefusedError, NoEndpointError, PickError
from epp.config.flow import WaitingSettings
from epp.picker.decision import Question
from epp.picker.events import Pick

NOT_READY: Final = "no_ready_endpoint"
"""`reason` of the error for which a request waits."""
_AT_ONCE: Final = 50
"""Most requests that are sent in one turn of the event loop."""
_MODELS: Final = 8
"""Most models that are tried in one turn. Clients choose the names, so each request may have another one."""
_SHOWN: Final = 16
"""Most models that are shown to people and to autoscalers."""


class UnservedRequest(Struct, eq=False, gc=False):
    """A request that waits for the first server. The caller passes it to `leave` if the client leaves."""

    question: Question
    decided: Callable[[Pick | PickError, float], None]
    size_bytes: int
    until: float
    """When it gets its error."""
    error: NoEndpointError
    """Without a traceback, which would keep what stood on the stack."""
    over: bool = False

    @property
    def model(self) -> str:
        return self.question.inference.model


class Unserved:
    """The requests of each model in the order of their arrival."""

    def __init__(self) -> None:
        self._models: dict[str, deque[UnservedRequest]] = {}
        """The model that was tried longest ago comes first. Requests that are over are removed later."""
        self._ends: list[tuple[float, int, UnservedRequest]] = []
        """A heap by the time at which each request gets its error. Those that are over are removed later."""
        self._number = 0
        self._held = 0
        """Requests in `_models`, with those that are over."""
        self._count = 0
        self._bytes = 0
        self._more = False
        """Whether the last turn sent a request, so that others may go too."""

    def __len__(self) -> int:
        return self._count

    @property
    def due_at(self) -> float:
        """When `serve` must be called at the latest. Infinity: none waits."""
        if not self._count:
            return inf
        return 0.0 if self._more else self._ends[0][0]

    def models(self) -> Collection[str]:
        """Return some models for which requests wait."""
        return [name for name, _ in zip(self._models, range(_SHOWN), strict=False)]

    def hold(self, waiting: UnservedRequest, *, most: WaitingSettings) -> None:
        """Let a request wait. Raises FlowRefusedError if there is no room."""
        if self._count >= most.max_requests or self._bytes + waiting.size_bytes > most.max_bytes:
            raise FlowRefusedError(
                "too many requests wait for the first server; try again in 10 s",
                reason="flow_full",
                retry_after_s=10,
            )
        self._models.setdefault(waiting.model, deque()).append(waiting)
        self._number, self._held = self._number + 1, self._held + 1
        heapq.heappush(self._ends, (waiting.until, self._number, waiting))
        self._count += 1
        self._bytes += waiting.size_bytes

    def leave(self, waiting: UnservedRequest) -> None:
        """Remove a request. It may have left already."""
        if waiting.over:
            return
        waiting.over = True
        self._count -= 1
        self._bytes -= waiting.size_bytes
        if max(self._held, len(self._ends)) > 2 * self._count:
            self._forget_those_over()

    def serve(self, pick: Callable[..., Pick], *, now: float) -> None:
        """Send the requests whose model has a ready server, and refuse those that have waited long enough.
        pick: `Picker.pick`.
        """
        while self._ends and (self._ends[0][0] <= now or self._ends[0][2].over):
            waiting = heapq.heappop(self._ends)[2]
            self._decide(waiting, waiting.error, now=now)
        left = _AT_ONCE
        for model in list(self._models)[:_MODELS]:
            while left and (requests := self._models.get(model)):
                fate = _fate(requests[0], pick, now=now)
                if fate is None:
                    break
                waiting = requests.popleft()
                self._held -= 1
                left -= not waiting.over
                self._decide(waiting, fate, now=now)
            if requests := self._models.pop(model, None):
                self._models[model] = requests
        self._more = left < _AT_ONCE

    def give_up(self, *, now: float) -> None:
        """Refuse all requests, because the process ends."""
        for _, _, waiting in sorted(self._ends, key=lambda end: end[1]):
            self._decide(waiting, waiting.error, now=now)

    def _decide(self, waiting: UnservedRequest, fate: Pick | PickError, *, now: float) -> None:
        if not waiting.over:
            self.leave(waiting)
            waiting.decided(fate, now)

    def _forget_those_over(self) -> None:
        """Free the memory of requests that are over."""
        self._ends = [end for end in self._ends if not end[2].over]
        heapq.heapify(self._ends)
        kept = {m: deque(each for each in waiting if not each.over) for m, waiting in self._models.items()}
        self._models = {model: waiting for model, waiting in kept.items() if waiting}
        self._held = self._count

    def check_integrity(self) -> None:
        held = [each for requests in self._models.values() for each in requests]
        waiting = [each for each in held if not each.over]
        assert self._held == len(held) <= 2 * self._count
        assert self._count == len(waiting) == sum(not end[2].over for end in self._ends)
        assert self._bytes == sum(each.size_bytes for each in waiting)
        assert len(self._ends) <= 2 * self._count


def _fate(waiting: UnservedRequest, pick: Callable[..., Pick], *, now: float) -> Pick | PickError | None:
    """Return what becomes of a request. None: its model has no ready server yet."""
    if waiting.over:
        return waiting.error
    try:
        return pick(waiting.question, now=now)
    except PickError as error:
        return None if isinstance(error, NoEndpointError) and error.reason == NOT_READY else error
