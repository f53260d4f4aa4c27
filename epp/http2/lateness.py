"""Measures how long bytes have waited for this process before they are read, from the time when the event
loop last looked for bytes.

The loop asks the kernel once in each iteration which connections have bytes. So the bytes of a connection
came after the previous look, or after the last read if the edge had stopped reading. This is true as long as
the process was busy. If it was not busy, the loop was waiting, and the bytes came just now. The process was
busy if the CPU time of the thread since the look, scaled by how slowly its CPU time passes (a quota or other
processes may take the rest), is most of the time since then. Pure; owned by the server, for all its
connections.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
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


class Lateness:
    def __init__(self, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
        """cpu_clock: CPU time of the event loop's thread."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.looks = 0
        """Number of looks so far."""
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
