"""Makes a process slow in one of two ways. Both need root.

`evenly` starts a competitor of higher priority on the same core. The competitor takes all but a share of each
millisecond, so the process runs as on a slower machine. `by_quota` sets a cgroup's quota, as a pod's CPU
limit does. The kernel checks quotas at its timer ticks. With 250 ticks a second and a quota of an eighth of a
core in periods of 10 ms, the process runs for 4 ms and then stands still for up to 44 ms. Nothing in the
process can answer during this pause, so a quota shows the kernel's pauses in addition to the process's own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_QUOTA_PERIOD_US: Final = 10_000
_PERIOD_S: Final = 0.001
_FIRST_NICE: Final = -20


def run_before_others() -> None:
    """Run this process and its children with a higher priority than others, and not on the last core. A busy
    machine then changes the result little.
    """
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus - {max(cpus)})
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@contextlib.contextmanager
def evenly(core: float, pid: int) -> Iterator[None]:
    """Pin a process to the last core, and leave it this share of each millisecond there, with a higher
    priority than nearly all other processes.

    This lasts until the process ends. The process is not a real-time process: if real-time processes used all
    of a core, the kernel would take 50 ms of each second from them in one piece
    (`kernel.sched_rt_runtime_us`). The competitor alone uses less than all of a core.
    """
    cpu = (os.cpu_count() or 1) - 1
    _run(pid, cpu, os.SCHED_OTHER, priority=0)
    _raise_priority(pid)
    command = [sys.executable, "-m", "bench.dataplane.slowing", str(cpu), str(core)]
    with subprocess.Popen(command) as competitor:
        try:
            yield
        finally:
            competitor.kill()


@contextlib.contextmanager
def by_quota(core: float, pid: int) -> Iterator[None]:
    """Let a process use this share of a core in every 10 ms."""
    quota_us, old = int(core * _QUOTA_PERIOD_US), Path("/sys/fs/cgroup/cpu").is_dir()
    group = _own_group(old=old) / f"picker-{pid}"
    group.mkdir()
    try:
        if old:
            (group / "cpu.cfs_period_us").write_text(str(_QUOTA_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {_QUOTA_PERIOD_US}")
        _run(pid, (os.cpu_count() or 1) - 1, os.SCHED_OTHER, priority=0)
        _raise_priority(pid)
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            group.rmdir()


def _own_group(*, old: bool) -> Path:
    """Return the cgroup of this process. `old` asks for a cgroup of the first version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("cpu" in controllers.split(",")) if old else not controllers:
            return Path("/sys/fs/cgroup/cpu" if old else "/sys/fs/cgroup") / path.lstrip("/")
    raise FileNotFoundError("no cgroup limits the CPU of this process")


def _run(pid: int, cpu: int, policy: int, *, priority: int) -> None:
    """Run all threads of a process on this core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {cpu})
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


def _raise_priority(pid: int) -> None:
    """Give the process a higher priority than all processes that are not real-time.

    The kernel may compare sessions first, and then the processes in each session.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _FIRST_NICE)
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text(str(_FIRST_NICE))


def _compete(cpu: int, left: float) -> None:
    """Compete for the CPU forever."""
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    clock = time.perf_counter
    due = clock()
    while True:
        due = max(due + _PERIOD_S, clock())
        while clock() < due - left * _PERIOD_S:
            pass
        time.sleep(max(left * _PERIOD_S / 2, due - clock()))


if __name__ == "__main__":
    _compete(int(sys.argv[1]), float(sys.argv[2]))
