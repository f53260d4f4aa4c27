"""Requests that wait because no server of their model is ready, as in a pool that was scaled to zero.

The gate holds a request here in place of its 503, for as long as the policy's `flow.waitForServerSeconds`.
When a server is ready, the requests go in the order of their arrival. Synchronous, without a clock.

Invariant: each request that is held leaves, or its `Answer` is called once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
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


class UnservedRequest(Struct, eq=False, gc=False):
    """A request that waits for the first server. The caller passes it to `leave` if the client leaves."""

    request: Question
    decided: Callable[[Pick | PickError, float], None]
    size_bytes: int
    until: float
    """When it gets its error."""
    error: NoEndpointError


class Unserved:
    """The requests in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: dict[UnservedRequest, None] = {}
        self._bytes = 0
        self._more = False
        """Whether the last turn ended before it came to all requests."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due_at(self) -> float:
        """When `serve` must be called at the latest. Infinity: none waits."""
        return 0.0 if self._more else next((waiting.until for waiting in self._waiting), inf)

    def models(self) -> Mapping[str, int]:
        """Return how many requests wait for each model."""
        return Counter(waiting.request.inference.model for waiting in self._waiting)

    def hold(self, waiting: UnservedRequest, *, most: WaitingSettings) -> None:
        """Let a request wait. Raises FlowRefusedError if there is no room."""
        if len(self._waiting) >= most.max_requests or self._bytes + waiting.size_bytes > most.max_bytes:
            raise FlowRefusedError(
                "too many requests wait for the first server; try again in 10 s",
                reason="flow_full",
                retry_after_s=10,
            )
        self._waiting[waiting] = None
        self._bytes += waiting.size_bytes

    def leave(self, waiting: UnservedRequest) -> None:
        """Remove a request. It may have left already."""
        if waiting in self._waiting:
            del self._waiting[waiting]
            self._bytes -= waiting.size_bytes

    def serve(self, pick: Callable[..., Pick], *, now: float) -> None:
        """Send the requests whose model has a ready server, and refuse those that have waited long enough.
        pick: `Picker.pick`.
        """
        unready: set[str] = set()
        decided = 0
        for waiting in list(self._waiting):
            self._more = decided == _AT_ONCE
            if self._more:
                break
            fate: Pick | PickError | None = waiting.error if now >= waiting.until else None
            model = waiting.request.inference.model
            if fate is None and model not in unready:
                try:
                    fate = pick(waiting.request, now=now)
                except PickError as error:
                    fate = error
                if isinstance(fate, NoEndpointError) and fate.reason == NOT_READY:
                    unready.add(model)
                    fate = None
            if fate is not None:
                decided += 1
                self.leave(waiting)
                waiting.decided(fate, now)

    def give_up(self, *, now: float) -> None:
        """Refuse all requests, because the process ends."""
        self._more = False
        for waiting in list(self._waiting):
            self.leave(waiting)
            waiting.decided(waiting.error, now)

    def check_integrity(self) -> None:
        assert self._bytes == sum(waiting.size_bytes for waiting in self._waiting)
