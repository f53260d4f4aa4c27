"""Runs the thread that follows the servers' KV events and maps routed prompts, and passes its findings to the
picker.

The thread works in turns. Between two turns the event loop applies the findings of the last one to the
picker, in portions, while the thread rests. `sockets` and `exact` make all decisions. The only objects of the
loop that the thread uses are the queue of prompts, which is made for this, and `_wanted`.

Exact mode improves the table, but the picker does not need it. An unexpected error, in the thread or in its
findings, turns exact mode off and ends `run` with this error. The states show the reason. The picker goes on
with its table as it is. The next `run` knows nothing of the previous one. The composition root makes the
service and runs it again after a pause. It imports this module only if the configuration asks for exact mode.
The import raises ConfigError if a package is missing.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from epp.base.errors import ConfigError
from epp.base.types import Endpoint, EndpointName
from epp.config.sections import ExactMode
from epp.picker.picker import Picker
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus, KvReport
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.routed_prompts import RoutedPrompts
from epp.sources.kvevents.sequence import Step

try:
    import zmq

    from epp.sources.kvevents.language import FolderLanguage
    from epp.sources.kvevents.sockets import Context, EventSource, Followed, new_context
except ModuleNotFoundError as missing:
    raise ConfigError(
        f"exactMode: the package {missing.name} is not installed: pip install 'prefix-gateway[exact]'"
    ) from missing

_log = logging.getLogger(__name__)

_TURN_S: Final = 0.05
"""A turn without findings ends after this time."""
_PAUSE_S: Final = 0.05
"""The thread looks again after this time if nothing has come. A look takes some 5 us for each server."""
_PROMPTS_A_ROUND: Final = 4
_FINDINGS_A_PORTION: Final = 64
"""Most findings that are applied to the table before requests get their turn. Each takes some 5 us."""
_LOOK_EVERY_S: Final = 0.5
"""How often the thread looks for new servers, tries those again that it could not listen to, and writes the
status."""
_MOST_CHUNKS: Final = 100_000
"""Most chunks of routed prompts to follow. A chunk takes about 1 KB of memory."""


class ExactService:
    """`make_exact` is called at each run."""

    def __init__(
        self, picker: Picker, queue: RoutedPrompts, make_exact: Callable[[], Exact], settings: ExactMode
    ) -> None:
        self._picker = picker
        self._queue = queue
        self._make_exact = make_exact
        self._settings = settings
        self._wanted: Mapping[EndpointName, EventSource] = {}
        """The loop replaces this mapping as a whole, and the thread reads it."""
        self._exact: Exact
        self._context: Context
        self._followed: dict[EndpointName, Followed]
        self._look_at: float
        """Each run makes these."""
        self._gaps = {"found": 0, "lost": 0}
        self._status = ExactStatus(models={}, servers={}, gaps=self._gaps, malformed=0)
        """The status, at most half a second old. The thread replaces the status as a whole."""

    @property
    def status(self) -> ExactStatus:
        return replace(
            self._status, dropped_prompts=self._queue.dropped, corrections=self._picker.caches.corrected
        )

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        found = ((endpoint.name, event_source(endpoint, self._settings)) for endpoint in endpoints)
        self._wanted = {name: source for name, source in found if source is not None}

    async def run(self) -> None:
        """Run until cancelled, or until an unexpected error. The error is raised once exact mode is off."""
        try:
            self._exact, self._context = self._make_exact(), new_context()
            self._followed, self._look_at = {}, 0.0
            await self._follow()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic of the tokenizers package is no Exception
            self._turn_off(f"failed: {type(error).__name__}: {error}")
            raise

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="kv-events") as thread:
                while True:
                    await self._apply(await loop.run_in_executor(thread, self._turn))
        finally:
            for one in self._followed.values():
                one.close()
            self._context.term()

    async def _apply(self, found: Sequence[KvReport]) -> None:
        for start in range(0, len(found), _FINDINGS_A_PORTION):
            self._picker.caches.take_in(found[start : start + _FINDINGS_A_PORTION])
            await asyncio.sleep(0)

    def _turn_off(self, reason: str) -> None:
        last = self._status
        models = {name: replace(m, state="off", reason=reason) for name, m in last.models.items()}
        models = models or {"": ExactModelStatus(state="off", reason=reason, prompts={})}
        servers = {name: replace(s, state="off", reason=reason, blocks=0) for name, s in last.servers.items()}
        self._status = replace(last, models=models, servers=servers)

    # -- the thread ------------------------------------------------------------------------------------------

    def _turn(self) -> list[KvReport]:
        """Work until there are findings, but no longer than a turn takes."""
        now = time.monotonic()
        end = now + _TURN_S
        while now < end:
            if now >= self._look_at:
                self._look_at = now + _LOOK_EVERY_S
                self._look()
            busy = self._read(now=now)
            found = self._exact.findings(now=now)
            if found:
                return found
            if not busy:
                time.sleep(_PAUSE_S)
            now = time.monotonic()
        return []

    def _read(self, *, now: float) -> bool:
        """Read some messages of each server, and some prompts. Returns whether there were any."""
        busy = False
        for name, one in self._followed.items():
            steps = one.read(now=now)
            if steps:
                busy = True
                self._apply_steps(name, steps, now=now)
        while self._queue.restarted:
            name = self._queue.restarted.popleft()
            if name in self._followed:
                self._apply_steps(name, self._followed[name].restarted(), now=now)
        for _ in range(_PROMPTS_A_ROUND):
            routed = self._queue.take()
            if routed is None:
                return busy
            self._exact.routed(routed, now=now)
        return True

    def _apply_steps(self, name: EndpointName, steps: Sequence[Step], *, now: float) -> None:
        self._exact.apply(name, steps, complete=self._followed[name].messages.complete, now=now)

    def _look(self) -> None:
        """Follow the wanted servers, and no others, and write the status."""
        wanted, followed, before = self._wanted, self._followed, self._status
        unreachable: dict[EndpointName, ExactServerStatus] = {}
        for name in [name for name, one in followed.items() if wanted.get(name) != one.source]:
            self._drop(name)
        for name, source in wanted.items():
            try:
                if name in followed:
                    followed[name].renew()
                else:
                    followed[name] = Followed(
                        self._context, source, topic=self._settings.topic, gaps=self._gaps
                    )
                    self._exact.add(name, model=source.model)
            except zmq.ZMQError as error:
                why = f"cannot receive events: {source.events}: {zmq.strerror(error.errno or 0)}"
                unreachable[name] = ExactServerStatus(state="off", reason=why, blocks=0, events=0)
                self._drop(name)
        self._status = after = ExactStatus(
            models=self._exact.models(),
            servers={**self._exact.servers(), **unreachable},
            gaps=dict(self._gaps),
            malformed=self._exact.malformed,
        )
        _log_changes("model", before.models, after.models)
        _log_changes("server", before.servers, after.servers)
        if self._exact.last_error:
            _log.warning("exact mode skipped a prompt: %s", self._exact.last_error)
            self._exact.last_error = ""

    def _drop(self, name: EndpointName) -> None:
        gone = self._followed.pop(name, None)
        if gone is not None:
            gone.close()
            self._exact.drop(name)


def _log_changes(
    what: str,
    before: Mapping[Any, ExactModelStatus | ExactServerStatus],
    after: Mapping[Any, ExactModelStatus | ExactServerStatus],
) -> None:
    for name, one in after.items():
        was = before.get(name)
        if was is None or (was.state, was.reason) != (one.state, one.reason):
            level = logging.WARNING if one.state == "off" else logging.INFO
            _log.log(level, "exact mode, %s %s: %s %s", what, name or "(any)", one.state, one.reason)


def make(picker: Picker, settings: ExactMode, models: Mapping[str, ModelSettings]) -> ExactService:
    """Return the service. It listens to the picker from now on; `run` starts the rest."""
    prompts = RoutedPrompts()
    picker.subscribe(prompts.on_event)
    make_exact = partial(Exact, models, max_blocks=settings.max_blocks, max_chunks=_MOST_CHUNKS)
    return ExactService(picker, prompts, make_exact, settings)


def event_source(endpoint: Endpoint, settings: ExactMode) -> EventSource | None:
    """Return where a server publishes its events. None: nowhere."""
    rank = endpoint.rank or 0  # each rank publishes at the ports of rank 0 plus its number
    host = f"[{endpoint.address.host}]" if ":" in endpoint.address.host else endpoint.address.host
    events, replay = endpoint.kv_events, endpoint.kv_replay
    if not events and settings.events_port:
        events = f"tcp://{host}:{settings.events_port + rank}"
        replay = f"tcp://{host}:{settings.replay_port + rank}" if settings.replay_port else ""
    return EventSource(endpoint.model, endpoint.incarnation, events, replay) if events else None


def read_models(settings: ExactMode) -> dict[str, ModelSettings]:
    """Raises ConfigError if a tokenizer or a template is missing or cannot be read."""
    models = {}
    for n, one in enumerate(settings.models):
        try:
            language = FolderLanguage(
                Path(one.tokenizer_folder),
                template=Path(one.chat_template_file) if one.chat_template_file else None,
                arguments=one.chat_template_arguments,
            )
        except ConfigError as error:
            raise ConfigError(f"exactMode.models[{n}]: {error}") from error
        models[one.model] = ModelSettings(language=language, seed=one.hash_seed, adapters=one.adapters)
    return models
