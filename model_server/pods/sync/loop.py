"""The loop of `lora-sync` reads the file, asks the server, loads and unloads adapters, and reports.

A file that cannot be used does not count as empty: the last good file stays in use, and the status says so. A
server that does not answer is asked again at the next pass. Callers: `command`, and tests, which bring their
own clock.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_server.pods.sync.client import AdapterServer
from model_server.pods.sync.errors import AdapterFileError, ServerError
from model_server.pods.sync.files import read_adapters
from model_server.pods.sync.plan import (
    AdapterName,
    Adapters,
    AdapterStatus,
    Backoff,
    Record,
    failed,
    in_sync,
    next_retry_s,
    observed,
    plan,
    status,
    succeeded,
)

_MOST_ROUNDS = 3
"""The most rounds in one pass. An adapter whose path has changed takes two rounds: an unload and a load."""
_SHORTEST_WAIT_S = 0.1

_log = logging.getLogger(__name__)


class LoraSync:
    def __init__(
        self,
        *,
        file: Path,
        server: AdapterServer,
        clock: Callable[[], float],
        rng: random.Random,
        interval_s: float,
        backoff: Backoff,
        prune: bool,
    ) -> None:
        """With `prune`, the sync also unloads adapters that this process did not load and the file does not
        name.
        """
        self._file = file
        self._server = server
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s
        self._backoff = backoff
        self._prune = prune
        self._wanted: Adapters | None = None
        self._served: Adapters | None = None
        self._history: dict[AdapterName, Record] = {}
        self._file_error = ""
        self._server_error = ""
        self._passed_at_s: float | None = None

    @property
    def in_sync(self) -> bool:
        """Tell whether at the last pass the file could be read and the server had all its adapters."""
        if self._wanted is None or self._served is None or self._file_error or self._server_error:
            return False
        return in_sync(self._lines(self._wanted, self._served))

    def status(self) -> dict[str, Any]:
        """Return the status for a page, as plain data."""
        known = self._wanted is not None and self._served is not None
        now = self._clock()
        return {
            "server": self._server.url,
            "in_sync": self.in_sync,
            "file_error": self._file_error or None,
            "server_error": self._server_error or None,
            "checked_s_ago": None if self._passed_at_s is None else round(now - self._passed_at_s, 3),
            "adapters": [_shown(line) for line in self._lines(self._wanted or {}, self._served or {})]
            if known
            else [],
        }

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self.sync()
            await asyncio.sleep(self.wait_s())

    def wait_s(self) -> float:
        """Return the time until the next pass: the interval plus or minus a tenth, or less if something has
        to be tried again.
        """
        now = self._clock()
        usual = self._interval_s * (0.9 + 0.2 * self._rng.random())
        retry_at_s = next_retry_s(self._history, now=now)
        return usual if retry_at_s is None else max(_SHORTEST_WAIT_S, min(usual, retry_at_s - now))

    async def sync(self) -> None:
        """Do one pass. The status shows failures, and the log shows what was done."""
        try:
            self._wanted = read_adapters(self._file)
            self._file_error = ""
        except AdapterFileError as error:
            self._note_file_error(str(error))
        if self._wanted is None:
            return
        try:
            await self._converge(self._wanted)
            self._server_error = ""
        except ServerError as error:
            if str(error) != self._server_error:
                _log.warning("the adapters of the server are not known: %s", error)
            self._server_error = str(error)
        self._passed_at_s = self._clock()

    async def _converge(self, wanted: Adapters) -> None:
        for _ in range(_MOST_ROUNDS):
            await self._look(wanted)
            assert self._served is not None
            actions = plan(wanted, self._served, self._history, now=self._clock(), prune=self._prune)
            if not actions:
                return
            for action in actions:
                try:
                    await self._server.do(action)
                except ServerError as error:
                    _log.warning("%s of %s failed: %s", type(action).__name__.lower(), action.name, error)
                    self._history[action.name] = failed(
                        self._history.get(action.name),
                        action,
                        error=str(error),
                        now=self._clock(),
                        backoff=self._backoff,
                        rng=self._rng,
                    )
                else:
                    _log.info("%s of %s done (%s)", type(action).__name__.lower(), action.name, action.path)
                    self._history[action.name] = succeeded(action)
        await self._look(wanted)

    async def _look(self, wanted: Adapters) -> None:
        self._served = await self._server.adapters()
        self._history = observed(self._history, wanted=wanted, served=self._served)

    def _lines(self, wanted: Adapters, served: Adapters) -> list[AdapterStatus]:
        return status(wanted, served, self._history, now=self._clock(), prune=self._prune)

    def _note_file_error(self, error: str) -> None:
        if error != self._file_error:
            _log.warning("%s", error)
        self._file_error = error


def _shown(line: AdapterStatus) -> dict[str, Any]:
    return {
        "name": line.name,
        "path": line.path,
        "state": line.state,
        "failures": line.failures,
        "error": line.error or None,
        "retry_in_s": None if line.retry_in_s is None else round(line.retry_in_s, 3),
    }
