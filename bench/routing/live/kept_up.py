"""Shows whether two cores were enough: how much CPU each process of a run used, and how long it was ready to
run but had to wait for a core.

If a server of the cost model waits for a core, it answers later than its model says. The same holds for every
process between the server and the client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Use:
    """The seconds of one process, summed over all its threads."""

    ran_s: float
    waited_s: float

    def since(self, before: Use) -> Use:
        return Use(self.ran_s - before.ran_s, self.waited_s - before.waited_s)


def use_of(pid: int) -> Use:
    """Return the use of a process, read from the kernel's accounts of its run queues. Threads that have ended
    are left out.
    """
    ran_ns = waited_ns = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ran, waited, _ = file.read_text().split()
            ran_ns += int(ran)
            waited_ns += int(waited)
    return Use(ran_ns / 1e9, waited_ns / 1e9)


class Watch:
    """Watches named groups of processes from its creation on."""

    def __init__(self, pids: Mapping[str, list[int]]) -> None:
        self._pids = pids
        self._before = self._now()

    def uses(self) -> dict[str, Use]:
        now = self._now()
        return {name: use.since(self._before[name]) for name, use in now.items()}

    def _now(self) -> dict[str, Use]:
        found = {}
        for name, pids in self._pids.items():
            uses = [use_of(pid) for pid in pids]
            found[name] = Use(sum(u.ran_s for u in uses), sum(u.waited_s for u in uses))
        return found
