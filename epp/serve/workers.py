"""Runs several picker processes on one machine: starts them, forwards signals, and starts a dead one again.

Each worker is a complete picker with a socket of its own. Envoy spreads streams over the sockets, and its
health check leaves out a dead worker within a second or two. If the workers share without Redis, they meet at
a hub in this process. `cli` calls this module when `workers` is above one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from epp.serve.parts import write_beside
from epp.sources.sharing.hub import Hub

_log = logging.getLogger("epp.serve.workers")
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
