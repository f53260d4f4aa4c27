"""Decides which new requests are routed without being read, so that no request waits long while the picker is
overloaded.

Our HTTP/2 server says how long the first message of a request has waited for this process. An overload begins
when `_IN_A_ROW` requests in a row have waited longer than `TARGET_S`, and this has lasted for `_PATIENCE_S`.
From then on every request that waited longer is routed by load, from its headers only, and every other
request is read. So the waiting time stays near the target by itself, and the picker reads as many bodies as
it can. No control loop has to settle. Pure: time is an argument. Owned by `conversation.Streams`.
"""

from __future__ import annotations

from math import exp
from typing import Final

TARGET_S: Final = 0.012
"""A request waits with its headers alone:
what else comes for it goes before new requests (`epp.http2.beginnings`)."""
_LATEST_S: Final = 0.024
"""A body that waited so long, since something else held the process, is not read either."""
_PATIENCE_S: Final = 0.05
_IN_A_ROW: Final = 16
"""A queue that is gone sooner was a burst or a hiccup of the machine, and changes nothing;
so do a few requests that are late one by one."""
_GAP_S: Final = 0.1
"""With so long between two late requests, there was no queue in between:
no pause of the process is that long."""
_CALM_S: Final = 0.5
"""An overload is over when no request has waited longer than the target for so long.
Until then nothing is waited for."""
_SHARE_S: Final = 0.5
"""The share is an average over about so long."""


class Overload:
    def __init__(self) -> None:
        self._late = 0
        self._late_since = self._late_at = 0.0
        self._until = 0.0
        self._share = 0.0
        self._counted_at = 0.0

    def share(self, *, now: float) -> float:
        """The share of new requests that went by load lately, 0 to 1."""
        return self._share if now < self._until else 0.0

    def skips(self, *, waited_s: float, now: float) -> bool:
        """Whether a new request goes by load, unread.
        waited_s: how long its first message has waited for this process.
        """
        skipped = self._is_late(now=now) if waited_s > TARGET_S else False
        if skipped:
            self._until = now + _CALM_S
        elif waited_s <= TARGET_S:
            self._late = 0
        if now < self._until:
            self._count(skipped=skipped, now=now)
        return skipped

    def _is_late(self, *, now: float) -> bool:
        """A request waited too long. Whether that is an overload."""
        if self._late == 0 or now - self._late_at > _GAP_S:
            self._late, self._late_since = 0, now
        self._late += 1
        self._late_at = now
        return now < self._until or (self._late >= _IN_A_ROW and now - self._late_since >= _PATIENCE_S)

    def is_on(self, *, now: float) -> bool:
        """There is an overload, or there was one a moment ago."""
        return now < self._until

    def gives_up(self, *, waited_s: float, now: float) -> bool:
        """Whether a body that was to be read goes unread now."""
        return waited_s > _LATEST_S and now < self._until

    def _count(self, *, skipped: bool, now: float) -> None:
        """Requests of the same moment weigh the same as they do one after the other: 1 ms at the least."""
        elapsed_s = max(0.001, now - self._counted_at)
        self._counted_at = now
        weight = 1.0 - exp(-elapsed_s / _SHARE_S)
        self._share += weight * (skipped - self._share)
