"""Sets up the picker's processes: the interpreter and the allocator of one that reads large prompts and keeps
a large table, and several workers on one machine. `cli` and `up` call this module.

Each worker is a complete picker with a socket of its own. Envoy spreads streams over the sockets, and its
health check leaves out a dead worker within a second or two. The `Supervisor` starts the workers, forwards
signals, and starts a dead one again. If the workers share without Redis, they meet at a hub in this process.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from epp.serve.inputs import write_beside
from epp.sources.sharing.hub import Hub

# Numbers from glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

_KEEP_FREE_BYTES: Final = 64 * 2**20
"""The process keeps freed memory up to this much."""
_FROM_HEAP_BYTES: Final = 32 * 2**20
"""Smaller blocks come from the heap. This is the largest value that glibc accepts."""

_MOST_FILES: Final = 65_536

_PR_SET_PDEATHSIG: Final = 1
"""From Linux's prctl.h."""

_GC_THRESHOLDS: Final = (1_000, 200, 100)


def tune() -> None:
    """Keep freed memory for the next request, and run the garbage collector for cycles less often.

    glibc returns the top of the heap to the kernel as soon as a large prompt is freed, and the next prompt
    causes page faults again: some 250 for each request of 400 KB, a quarter of its CPU. With another
    allocator nothing changes.

    By default the collector runs after every 700 new objects, which are a few requests, although requests
    leave no cycles. The collector would walk the prefix table and the last decisions. Objects that exist now
    are never walked again. A run over the 1,000 youngest objects takes some 0.2 ms; over 10,000 objects it
    took 1.3 ms, and 20 ms if the picker has a quarter of a core.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEEP_FREE_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP_BYTES)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(0.0005)  # a thread that reads a file would keep the event loop waiting for 5 ms


def raise_file_limit() -> None:
    """Allow as many file descriptors as the system permits, since each connection, scrape and admin page
    needs one.

    Service managers start a process with a soft limit of 1,024 and a hard limit of many thousands.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def follow_parent() -> None:
    """End when the parent ends, even if the parent is killed. A worker without its supervisor would keep
    ports and sockets.

    This works only on Linux. On other systems nothing changes.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


# -- workers -------------------------------------------------------------------------------------------------

_log = logging.getLogger("epp.serve.process")
_BACKOFF_S = (0.2, 1.0, 5.0)
_UNUSABLE = 2
"""Exit status of a worker that cannot use its configuration."""
_HEALTHY_AFTER_S = 10.0
"""A worker that lived this long starts again without delay."""


class Supervisor:
    """Runs `count` workers until a signal stops them, then waits until they have drained."""

    def __init__(self, *, config_path: Path, count: int, meet: bool) -> None:
        """meet: give the workers a local socket over which they share."""
        self._config_path = config_path
        self._meet = meet
        self._hub_args: tuple[str, ...] = ()
        self._count = count
        self._stopping = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._status = 0

    async def run(self) -> int:
        """Return the exit status: 0 after a requested stop, 2 if a worker could not use its first
        configuration.
        """
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop)
        async with self._hub(), asyncio.TaskGroup() as group:
            for index in range(self._count):
                group.create_task(self._keep(index), name=f"worker-{index}")
        return self._status

    @contextlib.asynccontextmanager
    async def _hub(self) -> AsyncIterator[None]:
        """Yield a hub in a directory that only this user may enter. The directory is removed afterwards."""
        if not self._meet:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="epp-") as directory:
            hub = Hub(Path(directory) / "hub.sock")
            hub.start()
            write_beside(Path(directory) / "hub.sock")
            self._hub_args = ("--hub", f"{directory}/hub.sock")
            try:
                yield
            finally:
                await hub.close()

    def _stop(self) -> None:
        self._stopping.set()
        for process in self._running.values():
            if process.returncode is None:
                process.terminate()

    async def _keep(self, index: int) -> None:
        """Run one worker, and start it again when it dies. A worker that dies at once is started again after
        longer and longer pauses.
        """
        failures, first = 0, True
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            serve = ("-m", "epp", "serve", "--config", str(self._config_path), "--worker", str(index))
            process = await asyncio.create_subprocess_exec(sys.executable, *serve, *self._hub_args)
            self._running[index] = process
            if self._stopping.is_set():
                process.terminate()
            status = await process.wait()
            if self._stopping.is_set():
                return
            if status == _UNUSABLE and first:
                # The worker has logged the reason. A later failure does not stop the others, which keep their
                # configuration.
                self._status = status
                self._stop()
                return
            first = False
            failures = 0 if loop.time() - started > _HEALTHY_AFTER_S else failures + 1
            _log.error("worker %d ended with status %d and starts again", index, status)
            if failures:
                delay_s = _BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay_s)
