"""Decides which requests are routed without being read, so that no request waits long while the picker is
overloaded. The one number that decides is the age of a message: the time since its bytes came, at most.

An overload begins when the first messages of `_IN_A_ROW` requests in a row were older than `TARGET_S`, and
this has lasted for `_PATIENCE_S`. From then on every request with an older message is routed by load, from
its headers only, and every other request is read. So the waiting time stays near the target by itself, and
the picker reads as many bodies as it can. No control loop has to settle. `live_streams.LiveStreams` owns this
object.

Pure: time is an argument.
"""

from __future__ import annotations

from math import exp
from typing import Final

TARGET_S: Final = 0.012
"""An older message is late. Mostly the headers of a new request wait: messages of older requests go before
new requests (`epp.transport.http2.inbox`).
"""
_PATIENCE_S: Final = 0.05
_IN_A_ROW: Final = 16
"""An overload begins only after this many late requests in a row. A queue that is gone sooner was a burst or
a short pause of the machine, and changes nothing. Single late requests change nothing either.
"""
_GAP_S: Final = 0.1
"""If this much time lies between two late requests, there was no queue in between: no pause of the process is
that long.
"""
_CALM_S: Final = 0.5
"""An overload is over when no request has waited longer than the target for this time. Until then, a late
request needs no further proof to be skipped.
"""
_SHARE_S: Final = 0.5
"""The share is an average over about this time."""


class Overload:
    def __init__(self) -> None:
        self._late = 0
        self._late_since = self._late_at = 0.0
        self._until = 0.0
        self._share = 0.0
        self._counted_at = 0.0

    def share(self, *, now: float) -> float:
        """Return the share of new requests that were recently routed by load, from 0 to 1."""
        return self._share if now < self._until else 0.0

    def skips(self, *, waited_s: float, now: float) -> bool:
        """Return whether a new request is routed by load, unread. waited_s: the age of its first message."""
        if waited_s > TARGET_S:
            self._note_late(now=now)
        else:
            self._late = 0
        skipped = self.late(waited_s=waited_s, now=now)
        if now < self._until:
            self._count(skipped=skipped, now=now)
        return skipped

    def late(self, *, waited_s: float, now: float) -> bool:
        """Return whether there is an overload, and a message is too old for its request to be read."""
        return waited_s > TARGET_S and now < self._until

    def _note_late(self, *, now: float) -> None:
        if self._late == 0 or now - self._late_at > _GAP_S:
            self._late, self._late_since = 0, now
        self._late, self._late_at = self._late + 1, now
        if now < self._until or (self._late >= _IN_A_ROW and now - self._late_since >= _PATIENCE_S):
            self._until = now + _CALM_S

    def _count(self, *, skipped: bool, now: float) -> None:
        """Update the share. A request weighs as much as the time since the request before it, but at least 1
        ms.
        """
        elapsed_s = max(0.001, now - self._counted_at)
        self._counted_at = now
        weight = 1.0 - exp(-elapsed_s / _SHARE_S)
        self._share += weight * (skipped - self._share)
