"""Provides two clocks for a serving load: wall time, and the CPU time of the server.

On a machine with other work, wall time shows the other work more than the server's. The CPU clock counts what
the server's processes computed, and skips the time in which the server has nothing to do, as
`bench.model_server.peers` does. The client calls this module.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

_LOOK_S = 0.002


class Clock(Protocol):
    def now_s(self) -> float: ...

    async def until(self, at_s: float, *, busy: Callable[[], bool]) -> None:
        """Return at the moment `at_s`. `busy` says whether the server has a request to answer."""


class WallClock:
    def now_s(self) -> float:
        return time.monotonic()

    async def until(self, at_s: float, *, busy: Callable[[], bool]) -> None:
        del busy  # wall time passes whether the server works or not
        await asyncio.sleep(at_s - self.now_s())


class CpuClock:
    """The CPU seconds of some processes, with all their threads, plus the idle time that was skipped. A
    server of several processes that compute at the same time looks slower by this clock than it is.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._clocks = [_cpu_clock_of(pid) for pid in pids]
        self._skipped_s = 0.0

    def now_s(self) -> float:
        return sum(map(time.clock_gettime, self._clocks)) + self._skipped_s

    async def until(self, at_s: float, *, busy: Callable[[], bool]) -> None:
        while (left_s := at_s - self.now_s()) > 0:
            if not busy():
                self._skipped_s += left_s
                return
            await asyncio.sleep(_LOOK_S)


def _cpu_clock_of(pid: int) -> int:
    """Return Linux's number for the clock of a process, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | 2
