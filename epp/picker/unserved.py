"""Requests that wait because no server of their model is ready, as in a pool that was scaled to zero.

The gate holds a request here in place of its 503, for as long as the policy's `flow.waitForServerSeconds`.
When a server is ready, the requests go in the order of their arrival. Synchronous, without a clock.

Invariant: each request that is held leaves, or its `OnDecided` is called once.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import count, islice
from math import inf
from typing import Final

from msgspec import Struct

from epp.base.errors import FlowRefusedError, NotReadyError, PickError
from epp.config.flow import WaitingSettings
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.flow.queues import Alarms

AT_ONCE: Final = 50
"""Most waiting requests that are tried in one turn of the event loop. This takes some 10 ms."""
_SHOWN: Final = 16
"""Most models that are shown to people and to autoscalers."""


class UnservedRequest(Struct, eq=False, gc=False):
    """A request that waits for the first server. The caller passes it to `leave` if the client leaves."""

    question: Question
    decided: Callable[[Pick | PickError, float], None]
    size_bytes: int
    arrived_at: float
    expires_at: float
    """When it gets its error."""
    error: NotReadyError
    """Without a traceback, which would keep what stood on the stack."""
    number: int = 0
    """Its number in the order of arrival."""
    alarm_at: float = inf

    @property
    def model(self) -> str:
        return self.question.inference.model


class Unserved:
    """The requests of each model in the order of their arrival."""

    def __init__(self) -> None:
        self._models: dict[str, OrderedDict[int, UnservedRequest]] = {}
        """The requests by number. The model that was tried longest ago comes first."""
        self._ends: Alarms[UnservedRequest] = Alarms()
        self._numbers = count(1)
        self._bytes = 0
        self._more = False
        """Whether the last turn sent a request, so that others may go too."""

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def due_at(self) -> float:
        """When `serve` must be called at the latest. Infinity: none waits."""
        return 0.0 if self._more and len(self) else self._ends.due_at

    def models(self) -> Collection[str]:
        """Return some models for which requests wait."""
        return list(islice(self._models, _SHOWN))

    def hold(self, waiting: UnservedRequest, *, most: WaitingSettings) -> None:
        """Let a request wait. Raises FlowRefusedError if there is no room."""
        if len(self) >= most.max_requests or self._bytes + waiting.size_bytes > most.max_bytes:
            raise FlowRefusedError(
                "too many requests wait for the first server; try again in 10 s",
                reason="flow_full",
                retry_after_s=10,
            )
        waiting.number = next(self._numbers)
        self._models.setdefault(waiting.model, OrderedDict())[waiting.number] = waiting
        self._ends.set(waiting, waiting.expires_at)
        self._bytes += waiting.size_bytes

    def leave(self, waiting: UnservedRequest) -> bool:
        """Remove a request. Return False if it has left already."""
        requests = self._models.get(waiting.model)
        if requests is None or requests.pop(waiting.number, None) is None:
            return False
        if not requests:
            del self._models[waiting.model]
        self._ends.forget(waiting)
        self._bytes -= waiting.size_bytes
        return True

    def serve(self, pick: Callable[..., Pick], *, now: float) -> None:
        """Send the requests whose model has a ready server, and refuse those that have waited long enough.
        pick: `Picker.pick`.
        """
        for waiting in self._ends.due(now=now):
            self._decide(waiting, waiting.error, now=now)
        left = AT_ONCE
        self._more = False
        # Clients choose the names of models, so each request may have another one.
        for model in list(islice(self._models, AT_ONCE)):
            if not left:
                break
            while left and (requests := self._models.get(model)):
                left -= 1
                waiting = next(iter(requests.values()))
                fate: Pick | PickError
                try:
                    fate = pick(waiting.question, waited_s=now - waiting.arrived_at, now=now)
                except NotReadyError:
                    break
                except PickError as error:
                    fate = error
                self._more = True
                self._decide(waiting, fate, now=now)
            if requests := self._models.pop(model, None):
                self._models[model] = requests

    def give_up(self, *, now: float) -> None:
        """Refuse all requests, because the process ends."""
        for each in [each for requests in self._models.values() for each in requests.values()]:
            self._decide(each, each.error, now=now)

    def _decide(self, waiting: UnservedRequest, fate: Pick | PickError, *, now: float) -> None:
        if self.leave(waiting):
            waiting.decided(fate, now)
