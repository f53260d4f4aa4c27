"""Which new requests are routed without being read, so that no request waits long for a picker that has too much to do.

The transport measures how long a data plane's messages wait before they are read: it sends a PING, whose answer stands in the same
queue as the messages. Once that wait has been over `TARGET_S` for `_PATIENCE_S`, and this process is the busy side, a growing share of
new requests goes by load, from their headers alone. The share falls slowly once the wait is short, so that it settles where
the picker reads as many bodies as it can. Pure: time is an argument. Owned by `conversation.Streams`.
"""

from __future__ import annotations

from typing import Final

TARGET_S: Final = 0.01
"""A request waits twice in a queue, with its headers and with its body."""
_ALARM_S: Final = 3 * TARGET_S
"""At such a wait nothing is read until the queue is short again."""
_LOOK_S: Final = 0.01
"""Between two changes of the share."""
_RISE: Final = 0.05
_FALL: Final = 0.01
_PATIENCE_S: Final = 0.05
"""A wait that is over sooner was a burst or a hiccup of the machine, and changes nothing."""
_BUSY: Final = 0.7
"""Of the time between two looks that this process handled messages. With less, it is the data plane that answers late."""
_FORGET_S: Final = 0.5
"""Without a measurement for so long there is no queue."""


class Overload:
    def __init__(self) -> None:
        self._share = 0.0
        self._owed = 0.0
        self._worked_s = 0.0
        self._looked_at = 0.0
        self._late_since: float | None = None

    def share(self, *, now: float) -> float:
        """The share of new requests that goes by load, 0 to 1."""
        return self._share if now - self._looked_at <= _FORGET_S else 0.0

    def turn(self, *, worked_s: float, waited_s: float | None, now: float) -> None:
        """The transport handled messages for `worked_s`. waited_s: how long messages waited before; None: not measured."""
        self._worked_s += worked_s
        elapsed_s = now - self._looked_at
        if waited_s is None or elapsed_s < _LOOK_S:
            return
        late = waited_s > TARGET_S and self._worked_s >= _BUSY * elapsed_s
        self._share, self._worked_s, self._looked_at = self.share(now=now), 0.0, now
        if not late:
            self._late_since = None
            self._share = max(0.0, self._share - _FALL)
            return
        if self._late_since is None or elapsed_s > _FORGET_S:
            self._late_since = now
        if self._share or now - self._late_since >= _PATIENCE_S:
            step = _RISE * waited_s / TARGET_S
            self._share = min(1.0, self._share + step) if waited_s < _ALARM_S else 1.0

    def skips(self, *, now: float) -> bool:
        """Whether the next request goes by load. Evenly: of a share of a third every third one."""
        self._owed += self.share(now=now)
        if self._owed < 1.0:
            return False
        self._owed -= 1.0
        return True
