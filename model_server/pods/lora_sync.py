"""`model-server lora-sync`: a sidecar that gives one server, which is vLLM or `model-server`, the LoRA
adapters that a file lists, pass by pass. In a cluster the file is a mounted ConfigMap.

- A wanted adapter that is not served is loaded. A wanted adapter that is served from another path is unloaded
  first.
- This process unloads only what it has loaded itself, unless it prunes: adapters that the server got at its
  start or from another program stay.
- A failed action is tried again after a pause, which doubles with each failure. A part of the pause is
  random, so that the sidecars of a fleet do not ask a shared store at the same moment.
- A file that cannot be used does not count as empty: the last good file stays in use.
- A server that restarts has lost the loaded adapters, and gets them again in the next pass.

Callers: the command line, and tests, which bring their own clock.
"""

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import yaml
from aiohttp import web

Adapters = Mapping[str, str]
"""The path of each adapter, by name."""
State = Literal["loaded", "failed", "conflict", "foreign"]

_MOST_ROUNDS = 3
"""The most rounds in one pass. An adapter whose path has changed takes two rounds: an unload and a load."""
_LONGEST_PAUSE_S = 60.0
_LIST_TIMEOUT_S = 10.0
_CHANGE_TIMEOUT_S = 300.0
"""The timeout is long, because a load may fetch gigabytes."""
_SHOWN_CHARACTERS = 300

_log = logging.getLogger(__name__)


class AdapterFileError(Exception):
    """The file with the wanted adapters is missing or malformed."""


class ServerError(Exception):
    """The server cannot be reached, or refused the request. The status and the log show the message."""


@dataclass(frozen=True, slots=True)
class Action:
    verb: Literal["load", "unload"]
    name: str
    path: str
    """The path from which the adapter is loaded, or was loaded."""


@dataclass(frozen=True, slots=True)
class _Failure:
    error: str
    count: int
    retry_at_s: float


class _Adapter(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    path: str


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    adapters: tuple[_Adapter, ...]


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


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


class AdapterServer:
    """One server, named by its base URL. The caller closes the session."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def adapters(self) -> Adapters:
        """Return the adapters that the server has. Raise ServerError if the server does not answer with a
        list.
        """
        raw = await self._ask("GET", "/v1/models", None, timeout_s=_LIST_TIMEOUT_S)
        try:
            cards = msgspec.json.decode(raw, type=_Cards).data
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServerError(f"{self.url}/v1/models is not a list of models: {error}") from error
        return {card.id: card.root or "" for card in cards if card.parent is not None}

    async def do(self, action: Action) -> None:
        """Load or unload an adapter. Raise ServerError if the server refuses or fails."""
        body = {"lora_name": action.name}
        if action.verb == "load":
            body["lora_path"] = action.path
        await self._ask("POST", f"/v1/{action.verb}_lora_adapter", body, timeout_s=_CHANGE_TIMEOUT_S)

    async def _ask(self, method: str, path: str, body: dict[str, str] | None, *, timeout_s: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as answer:
                raw = await answer.read()
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path} did not answer in {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        if answer.status != HTTPStatus.OK:
            shown = raw.decode(errors="replace")[:_SHOWN_CHARACTERS]
            raise ServerError(f"{path} answered {answer.status}: {shown}")
        return raw


class LoraSync:
    def __init__(
        self,
        *,
        file: Path,
        server: AdapterServer,
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
        self._file_error = self._server_error = ""

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
        file_error = server_error = ""
        try:
            self._wanted = read_adapters(self._file)
        except AdapterFileError as error:
            file_error = str(error)
        try:
            if self._wanted is not None:
                await self._converge(self._wanted)
        except ServerError as error:
            server_error = f"the adapters of the server are not known: {error}"
        for fault, before in ((file_error, self._file_error), (server_error, self._server_error)):
            if fault and fault != before:
                _log.warning("%s", fault)
        self._file_error, self._server_error = file_error, server_error

    async def _converge(self, wanted: Adapters) -> None:
        for _ in range(_MOST_ROUNDS):
            actions = self._plan(wanted, await self._look())
            self._failures = {one: self._failures[one] for one in actions if one in self._failures}
            due = [one for one in actions if self._is_due(one)]
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    for flag, kind, unit, default, meaning in (
        ("--server", str, "URL", None, "address of the model server, for example http://127.0.0.1:8000"),
        ("--file", Path, "PATH", None, "YAML file that lists the adapters: adapters: [{name: sql, path: /a/sql}]"),
        ("--interval-s", float, "S", 5.0, "time between two passes, in seconds (default %(default)s)"),
        ("--status-port", int, "PORT", 8081, "port of /status (JSON) and /ready (default %(default)s); 0 takes a free port"),
        ("--status-host", str, "HOST", "127.0.0.1", "address at which --status-port listens (default %(default)s)"),
    ):  # fmt: skip
        parser.add_argument(
            flag, type=kind, metavar=unit, default=default, help=meaning, required=default is None
        )
    prune = "also unload adapters that this process did not load"
    parser.add_argument("--prune", action="store_true", help=prune)


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 if a signal ended it, 1 if the status port is taken, 2 for invalid flags."""
    if not args.interval_s > 0 or not args.server.startswith(("http://", "https://")):
        print("model-server: --server must be an http URL, and --interval-s above 0", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_run(args))
    except OSError as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(args: argparse.Namespace) -> None:
    key = os.environ.get("VLLM_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
        sync = LoraSync(
            file=args.file,
            server=AdapterServer(args.server, session),
            clock=time.monotonic,
            rng=random.Random(),
            prune=args.prune,
        )
        page = status_page(sync, host=args.status_host, port=args.status_port)
        port = await stack.enter_async_context(page)
        print(f"status at http://{args.status_host}:{port}/status", flush=True)
        syncing = asyncio.create_task(_keep(sync, args.interval_s), name="lora-sync")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, syncing.cancel)
        await asyncio.wait([syncing])
        if not syncing.cancelled():
            await syncing  # a fault of a pass ends the process


async def _keep(sync: LoraSync, interval_s: float) -> None:
    """Make passes. The time between two passes differs by up to a tenth, so that a fleet spreads."""
    while True:
        await sync.sync()
        await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))


@asynccontextmanager
async def status_page(sync: LoraSync, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve the page inside the block, and yield its port."""

    async def show(_: web.Request) -> web.Response:
        return web.json_response(sync.status())

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"in_sync": sync.in_sync}, status=200 if sync.in_sync else 503)

    app = web.Application()
    app.router.add_get("/status", show)
    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
