"""Measures how long bytes wait for this process, and decides which new requests are routed without being
read, so that no request waits long while the picker is overloaded.

`Lateness` measures, from the time when the event loop last looked for bytes. The loop asks the kernel once in
each iteration which connections have bytes. So the bytes of a connection came after the previous look, or
after the last read if the edge had stopped reading. This is true as long as the process was busy. If it was
not busy, the loop was waiting, and the bytes came just now. The process was busy if the CPU time of the
thread since the look, scaled by how slowly its CPU time passes (a quota or other processes may take the
rest), is most of the time since then. One object serves all connections of a server.

`Overload` decides. An overload begins when `_IN_A_ROW` requests in a row have waited longer than `TARGET_S`,
and this has lasted for `_PATIENCE_S`. From then on every request that waited longer is routed by load, from
its headers only, and every other request is read. So the waiting time stays near the target by itself, and
the picker reads as many bodies as it can. No control loop has to settle. Owned by `conversation.Streams`.

Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf
from typing import Final

_SURELY_BUSY_S: Final = 0.002
"""If bytes were read within this time after a look, it does not matter whether the loop waited."""
_BETWEEN_LOOKS_S: Final = 0.002
"""Least time between two looks, since each look makes the loop ask the kernel once more. The reported wait is
too long by at most twice this time."""
_BETWEEN_TURNS_S: Final = 0.001
"""Least time from the beginning of one measured turn to the beginning of the next. Reading the CPU time of a
thread is a call to the kernel; if every short turn were measured, there would be two such calls for each
chunk."""
_MOST: Final = 0.5
_KEEP: Final = 0.9
"""Weight of the earlier measurements after one more turn."""

TARGET_S: Final = 0.012
"""A new request waits with its headers only: messages of older requests go before new requests
(`epp.http2.beginnings`).
"""
_LATEST_S: Final = 0.024
"""A body is not read either if it has waited this long because something else held the process."""
_PATIENCE_S: Final = 0.05
_IN_A_ROW: Final = 16
"""So many late requests in a row are needed. A queue that is gone sooner was a burst or a short pause of the
machine, and changes nothing. Single late requests change nothing either.
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


class Lateness:
    def __init__(self, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
        """cpu_clock: CPU time of the event loop's thread."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.looks = 0
        """How often `look` was called so far."""
        self._asked = False
        self._looked_at = self._before = clock()
        self._rested_at, self._cpu_at_rest = self._looked_at, cpu_clock()
        """Time and CPU time of the last look or end of a turn. After that the loop may have waited."""
        self._turn_began, self._cpu_at_turn = -inf, 0.0
        self._measures = False
        """Whether the current turn is measured."""
        self._wall_s = self._cpu_s = 0.0
        """Wall time of the latest turns."""

    def read(self, *, before: float, resumed: int, now: float) -> float:
        """Call this when bytes of a connection are read. Returns the moment after which they came.

        before: when the connection was read last;
        resumed: the value of `looks` when the edge began to read the connection again after a pause.
        """
        since_s = now - self._rested_at
        self._measures = since_s > _SURELY_BUSY_S or now - self._turn_began >= _BETWEEN_TURNS_S
        if self._measures:
            cpu = self._cpu_clock()
            self._turn_began, self._cpu_at_turn = now, cpu
            if (
                since_s > _SURELY_BUSY_S
                and (cpu - self._cpu_at_rest) * self._wall_s < _MOST * since_s * self._cpu_s
            ):
                self._before = self._looked_at = now
                return now
        return before if self.looks - resumed <= 1 else max(before, self._before)

    def goes_on(self) -> None:
        """Call this when a turn begins with bytes that were read before."""
        self._measures = True
        self._turn_began, self._cpu_at_turn = self._clock(), self._cpu_clock()

    def worked(self) -> bool:
        """Call this when the bytes read so far are handled. Bytes that came meanwhile have waited.

        True: call `look` in the loop's next iteration, before the loop looks for bytes.
        """
        now = self._clock()
        if self._measures or now - self._rested_at >= _BETWEEN_TURNS_S:
            cpu = self._cpu_clock()
            self._rested_at, self._cpu_at_rest = now, cpu
            if self._measures:
                self._wall_s = _KEEP * self._wall_s + now - self._turn_began
                self._cpu_s = _KEEP * self._cpu_s + cpu - self._cpu_at_turn
        if self._asked or now - self._looked_at < _BETWEEN_LOOKS_S:
            return False
        self._asked = True
        return True

    def look(self) -> None:
        """Call this just before the loop looks for bytes."""
        self._asked = False
        self.looks += 1
        self._before, self._looked_at = self._looked_at, self._clock()
        self._rested_at, self._cpu_at_rest = self._looked_at, self._cpu_clock()


class Overload:
    def __init__(self) -> None:
        self.quiet = True
        """No request is late, and there is no overload. So the requests in time need not be counted."""
        self._late = 0
        self._late_since = self._late_at = 0.0
        self._until = 0.0
        self._share = 0.0
        self._counted_at = 0.0

    def share(self, *, now: float) -> float:
        """Return the share of new requests that were recently routed by load, from 0 to 1."""
        return self._share if now < self._until else 0.0

    def skips(self, *, waited_s: float, now: float) -> bool:
        """Return whether a new request is routed by load, unread.

        waited_s: how long its first message has waited for this process. Call this for each request that was
        late, and for all while it is not `quiet`.
        """
        skipped = waited_s > TARGET_S and self._is_late(now=now)
        if skipped:
            self._until = now + _CALM_S
        elif waited_s <= TARGET_S:
            self._late, self.quiet = 0, now >= self._until
        if now < self._until:
            self._count(skipped=skipped, now=now)
        return skipped

    def _is_late(self, *, now: float) -> bool:
        """Called when a request waited too long. Returns whether that is an overload."""
        if self._late == 0 or now - self._late_at > _GAP_S:
            self._late, self._late_since = 0, now
        self._late, self.quiet = self._late + 1, False
        self._late_at = now
        return now < self._until or (self._late >= _IN_A_ROW and now - self._late_since >= _PATIENCE_S)

    def gives_up(self, *, waited_s: float, now: float) -> bool:
        """Return whether a body that should be read is now left unread."""
        return waited_s > _LATEST_S and now < self._until

    def _count(self, *, skipped: bool, now: float) -> None:
        """Update the share. Requests of the same moment weigh as much as requests that come one after the
        other: 1 ms at least.
        """
        elapsed_s = max(0.001, now - self._counted_at)
        self._counted_at = now
        weight = 1.0 - exp(-elapsed_s / _SHARE_S)
        self._share += weight * (skipped - self._share)
