"""Decides which Events to write, and limits their rate, because an API server keeps each Event for an hour.

Pure. If the same text comes again within `_SAME_S`, the count of its Event is raised. Different texts take
tokens from one bucket, and an Event that finds the bucket empty is left out. `writing` writes the chosen
Events and logs the others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final, Literal

_SAME_S: Final = 600.0
_KEPT: Final = 64
_BURST: Final = 10
_REFILL_S: Final = 15.0
"""Once the burst is used up, one more Event is allowed every so many seconds."""
_MESSAGE_CHARS: Final = 1000

_NOBODY: Final = (
    "requests get 503: no pod of the pool is Ready; look at its selector and at the pods' readiness"
)


@dataclass(frozen=True, slots=True)
class EventText:
    """Something that an operator must know. The reasons are a fixed set, which the docs explain."""

    reason: Literal[
        "NoEndpoints",
        "EndpointsReady",
        "EndpointEjected",
        "EndpointReturned",
        "PolicyRefused",
        "PolicyApplied",
    ]
    message: str
    kind: Literal["Normal", "Warning"] = "Warning"
    pool: str = ""
    """The InferencePool that the Event is attached to. Empty: it is about the policy alone."""
    policy: str = ""
    """Name and uid of the policy that the Event is about. Empty: it is about the pool alone."""
    policy_uid: str = ""


@dataclass(slots=True)
class Written:
    """An Event that was written. If the same text comes again, its count is raised."""

    text: EventText
    name: str
    count: int
    first_time: str
    last_at: float


class EventBudget:
    """Times are monotonic seconds, except for the texts that go into objects."""

    def __init__(self) -> None:
        self._written: OrderedDict[EventText, Written] = OrderedDict()
        self._tokens = float(_BURST)
        self._filled_at = 0.0
        self._named = 0

    def offer(self, text: EventText, *, now: float, time_text: str) -> Written | None:
        """Return the Event to write now; a count of 1 means a new Event. None: the Event is left out."""
        text = replace(text, message=text.message[:_MESSAGE_CHARS])
        self._tokens = min(_BURST, self._tokens + (now - self._filled_at) / _REFILL_S)
        self._filled_at = now
        if self._tokens < 1:
            return None
        self._tokens -= 1
        event = self._written.get(text)
        if event is not None and now - event.last_at < _SAME_S:
            event.count += 1
            event.last_at = now
        else:
            self._named += 1
            event = Written(text, f"{self._named:x}", 1, time_text, now)
            self._written[text] = event
        self._written.move_to_end(text)
        while len(self._written) > _KEPT:
            self._written.popitem(last=False)
        return event

    def forget(self, event: Written) -> None:
        """Forget an Event that could not be written. The next one with the same text is a new Event."""
        self._written.pop(event.text, None)

    def check_integrity(self) -> None:
        assert len(self._written) <= _KEPT
        assert -1e-9 <= self._tokens <= _BURST
        assert all(key == event.text and event.count >= 1 for key, event in self._written.items())


class EndpointChanges:
    """Compares a pool's endpoints between two looks. Changes of many are reported in one sentence."""

    _NAMED: Final = 5

    def __init__(self, *, pool: str) -> None:
        self._pool = pool
        self._known: dict[str, bool] = {}
        self._any_ready: bool | None = None

    def look(self, ready: dict[str, str]) -> list[EventText]:
        """Return the texts about the changes since the last look.

        ready: for each endpoint, why it may not be picked. Empty: it may be picked.
        """
        ejected = [n for n, why in ready.items() if why and self._known.get(n)]
        returned = [n for n, why in ready.items() if not why and self._known.get(n) is False]
        self._known = {name: not why for name, why in ready.items()}
        texts: list[EventText] = []
        if ejected:
            why = ready[ejected[0]]
            text = f"no requests go to {self._names(ejected)} until scrapes succeed: {why}"
            texts.append(EventText("EndpointEjected", text, pool=self._pool))
        if returned:
            text = f"requests go to {self._names(returned)} again"
            texts.append(EventText("EndpointReturned", text, "Normal", self._pool))
        any_ready = any(self._known.values())
        if any_ready != self._any_ready:
            if not any_ready:
                texts.append(EventText("NoEndpoints", _NOBODY, pool=self._pool))
            elif self._any_ready is not None:
                texts.append(EventText("EndpointsReady", "there are endpoints again", "Normal", self._pool))
        self._any_ready = any_ready
        return texts

    def check_integrity(self) -> None:
        assert self._any_ready is None or self._any_ready == any(self._known.values())

    def _names(self, names: list[str]) -> str:
        more = len(names) - self._NAMED
        return ", ".join(sorted(names)[: self._NAMED]) + (f" and {more} more" if more > 0 else "")
