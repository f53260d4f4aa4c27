"""Gives one server the LoRA adapters that a file lists, pass by pass. In a cluster the file is a mounted
ConfigMap.

- A wanted adapter that is not served is loaded. A wanted adapter that is served from another path is unloaded
  first.
- This process unloads only what it has loaded itself, unless it prunes: adapters that the server got at its
  start or from another program stay.
- A failed action is tried again after a pause, which doubles with each failure. A part of the pause is
  random, so that the sidecars of a fleet do not ask a shared store at the same moment.
- A file that cannot be used does not count as empty: the last good file stays in use.
- A server that restarts has lost the loaded adapters, and gets them again in the next pass.

Callers: `command`, and tests, which bring their own clock.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import yaml

from model_server.pods.sync.client import Action, Adapters, ServerError

_MOST_ROUNDS = 3
"""The most rounds in one pass. An adapter whose path has changed takes two rounds: an unload and a load."""
_LONGEST_PAUSE_S = 60.0

_log = logging.getLogger(__name__)

State = Literal["loaded", "failed", "conflict", "foreign"]


class AdapterFileError(Exception):
    """The file with the wanted adapters is missing or malformed."""


class _Adapter(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    path: str


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    adapters: tuple[_Adapter, ...]


class Server(Protocol):
    url: str

    async def adapters(self) -> Adapters: ...
    async def do(self, action: Action) -> None: ...


@dataclass(frozen=True, slots=True)
class _Failure:
    error: str
    count: int
    retry_at_s: float


def read_adapters(file: Path) -> Adapters:
    """Return the wanted adapters. Raise AdapterFileError if the file is not complete and valid. A file
    without the key `adapters` is not valid either. A file that lists no adapters has an empty list.
    """
    try:
        found = msgspec.convert(yaml.safe_load(file.read_bytes()), _File).adapters
    except OSError as error:
        raise AdapterFileError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AdapterFileError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise AdapterFileError(f"{file}: {error}") from error
    wanted: dict[str, str] = {}
    for adapter in found:
        if not adapter.name or not adapter.path:
            raise AdapterFileError(f"{file}: an adapter needs a name and a path")
        if adapter.name in wanted:
            raise AdapterFileError(f"{file}: {adapter.name!r} is listed twice")
        wanted[adapter.name] = adapter.path
    return wanted


class LoraSync:
    def __init__(
        self,
        *,
        file: Path,
        server: Server,
        clock: Callable[[], float],
        rng: random.Random,
        prune: bool = False,
    ) -> None:
        """With `prune`, the sync also unloads adapters that this process did not load and the file does not
        name.
        """
        self._file = file
        self._server = server
        self._clock = clock
        self._rng = rng
        self._prune = prune
        self._wanted: Adapters | None = None
        self._served: Adapters | None = None
        self._ours: dict[str, str] = {}
        """The served adapters that this process loaded."""
        self._failures: dict[Action, _Failure] = {}
        self._file_error = ""
        self._server_error = ""

    @property
    def in_sync(self) -> bool:
        """Tell whether at the last pass the file could be read and the server had all its adapters."""
        if self._wanted is None or self._served is None or self._file_error or self._server_error:
            return False
        return all(line["state"] in ("loaded", "foreign") for line in self._lines())

    def status(self) -> dict[str, Any]:
        """Return the status for a page, as plain data."""
        return {
            "server": self._server.url,
            "in_sync": self.in_sync,
            "file_error": self._file_error or None,
            "server_error": self._server_error or None,
            "adapters": self._lines(),
        }

    async def sync(self) -> None:
        """Do one pass. The status shows failures, and the log shows what was done."""
        try:
            self._wanted = read_adapters(self._file)
            self._file_error = ""
        except AdapterFileError as error:
            if str(error) != self._file_error:
                _log.warning("%s", error)
            self._file_error = str(error)
        if self._wanted is None:
            return
        try:
            await self._converge(self._wanted)
            self._server_error = ""
        except ServerError as error:
            if str(error) != self._server_error:
                _log.warning("the adapters of the server are not known: %s", error)
            self._server_error = str(error)

    async def _converge(self, wanted: Adapters) -> None:
        for _ in range(_MOST_ROUNDS):
            actions = self._plan(wanted, await self._look())
            self._failures = {
                action: self._failures[action] for action in actions if action in self._failures
            }
            due = [action for action in actions if self._is_due(action)]
            if not due:
                return
            for action in due:
                await self._do(action)
        await self._look()

    async def _look(self) -> Adapters:
        served = self._served = await self._server.adapters()
        self._ours = {name: path for name, path in self._ours.items() if served.get(name) == path}
        return served

    def _plan(self, wanted: Adapters, served: Adapters) -> list[Action]:
        """Return the actions to do now, at most one for each name. The actions that free room come first."""
        unwanted = {name: path for name, path in served.items() if wanted.get(name) != path}
        unloads = [Action("unload", *each) for each in unwanted.items() if self._may_unload(*each)]
        loads = [Action("load", *each) for each in wanted.items() if each[0] not in served]
        return [*unloads, *loads]

    def _may_unload(self, name: str, path: str) -> bool:
        return self._prune or self._ours.get(name) == path

    def _is_due(self, action: Action) -> bool:
        failure = self._failures.get(action)
        return failure is None or self._clock() >= failure.retry_at_s

    async def _do(self, action: Action) -> None:
        try:
            await self._server.do(action)
        except ServerError as error:
            _log.warning("%s of %s failed: %s", action.verb, action.name, error)
            before = self._failures.get(action)
            count = before.count + 1 if before else 1
            longest = min(_LONGEST_PAUSE_S, 2.0 ** min(count - 1, 10))
            retry_at_s = self._clock() + longest * (0.5 + 0.5 * self._rng.random())
            self._failures[action] = _Failure(str(error), count, retry_at_s)
            return
        _log.info("%s of %s done (%s)", action.verb, action.name, action.path)
        if action.verb == "load":
            self._ours[action.name] = action.path

    def _lines(self) -> list[dict[str, str | None]]:
        """Return a line for each adapter that is wanted or served, the wanted adapters first."""
        if self._wanted is None or self._served is None:
            return []
        errors = {action.name: failure.error for action, failure in self._failures.items()}
        lines: list[dict[str, str | None]] = []
        for name in dict.fromkeys((*self._wanted, *self._served)):
            wanted, served = self._wanted.get(name), self._served.get(name)
            state: State = "failed"
            error = errors.get(name)
            if wanted is not None and wanted == served:
                state, error = "loaded", None
            elif served is not None and not self._may_unload(name, served):
                state = "foreign" if wanted is None else "conflict"
                error = f"served from {served}, which this process did not load" if wanted else None
            lines.append({"name": name, "path": wanted or served, "state": state, "error": error})
        return lines
