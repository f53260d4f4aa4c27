"""Reads the CPU time of another process in nanoseconds: utime + stime of all its threads, including
threads that have ended.

/proc/PID/stat counts this time in ticks of 10 ms, and several requests fit into one tick. The kernel's CPU
clock of a process counts the same time exactly.
"""

import time
from collections.abc import Mapping

_CPU_CLOCK = 2
"""CPUCLOCK_SCHED in Linux's encoding of a process's clock id, as clock_getcpuclockid(3) returns it."""


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that the process has used so far. Raise OSError if the process has ended."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


class CpuMeter:
    """The CPU time of several named processes since the last `lap`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._last = self._read()

    def lap(self) -> dict[str, float]:
        """Return the seconds that each process used since the last lap, or since the start."""
        before, self._last = self._last, self._read()
        return {name: self._last[name] - before[name] for name in before}

    def _read(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self._pids.items()}
