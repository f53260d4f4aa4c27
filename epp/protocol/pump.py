"""The timer of the gate: one timer for all waiting requests, so that no request needs a task of its own. The
timer calls the gate when the gate's next decision is due, and soon after each event that may have freed a
server. There is no timer while no request waits. If the gate fails, the failure is logged, and the timer goes
on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import Final

from epp.picker.gate import Gate

_log = logging.getLogger(__name__)
_SOON_S: Final = 0.002
"""Events of the same moment are answered together, after this pause."""
_LONGEST_S: Final = 1.0
"""A change of policy or a new server is noticed within this time."""
_AFTER_FAULT_S: Final = 0.1


class Pump:
    """Runs the timer. Call `soon` after each event, and `stop` at the end. All calls come from one event
    loop.
    """

    def __init__(self, gate: Gate, *, clock: Callable[[], float], after: Callable[..., None]) -> None:
        """Make the timer. after: called with the time `now`, each time after the gate was pumped."""
        self._gate = gate
        self._clock = clock
        self._after = after
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf
        self._stopped = False

    def soon(self) -> None:
        self._set(self._clock() + _SOON_S)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        if self._stopped or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer, self._due = None, inf
        now = self._clock()
        try:
            self._gate.pump(now=now)
            due = min(self._gate.due_at, now + _LONGEST_S)
        except Exception:  # noqa: BLE001 - whatever it is, the others go on waiting and are looked at again
            _log.exception("flow control failed; the waiting requests will be considered again")
            due = now + _AFTER_FAULT_S
        self._after(now=now)
        if self._gate.due_at < inf:
            self._set(max(due, now + _SOON_S))
