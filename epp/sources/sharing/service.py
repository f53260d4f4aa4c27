"""Runs the exchange of one picker over a link: sends and reads batches. No pick waits for this.

There are three loops. `keep` starts each again if it fails. One forgets silent peers, whatever the link does.
The two that send and read wait for the link. After an error they try again, with growing pauses of up to a
second.

`make` says over which link a picker shares. `serve` calls this module.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Final

from epp.base.errors import ConfigError
from epp.config.reading import paths_of, read_file, read_secret
from epp.config.sharing import SIGNING_KEY, Redis, Sharing
from epp.picker.picker import Picker
from epp.sources.keep import Keep
from epp.sources.sharing.batches import Link, LinkError, MalformedBatchError
from epp.sources.sharing.exchange import Exchange
from epp.sources.sharing.hub import HubLink
from epp.sources.sharing_status import SharingStatus

_log = logging.getLogger("epp.sources.sharing")
_BACKOFF_S: Final = (0.05, 0.2, 0.5, 1.0)
_WARMUP_S: Final = 2.0
"""A starting picker waits no longer for what the others know."""
_CURRENT_S: Final = 1.0
"""A picker that reads batches of this age has read what was kept for it."""
_COMPARE_S: Final = 10.0
"""How often the hash secret is compared with the pool's."""
_PORTION_S: Final = 0.003
"""The events of others are applied for no longer than this, and one event, at a time."""
_LAST_WORDS_S: Final = 1.0
_CANCEL_AGAIN_S: Final = 0.2
_SPEAKER_BYTES: Final = 8


@dataclass(slots=True, eq=False)
class SharingService:
    """Call `run`. When it is cancelled, it closes the link."""

    exchange: Exchange
    link: Link
    _: KW_ONLY
    settings: Sharing
    keep: Keep
    clock: Callable[[], float] = time.monotonic
    _started: float = inf
    _channel: str = ""
    """The channel that this picker has joined."""
    _joined: bool = False
    """Whether it has sent all that it had to send there."""
    _unsent: bytes | None = None
    _agreed_at: float = -inf
    """When the hash secret was last compared with the pool's."""
    _secret_differs: bool = False
    _current: bool = False
    """Whether it has read what was kept for it, or could not."""
    _failures: Counter[str] = field(default_factory=Counter)
    """How often in a row sending or reading has failed, for each that fails now."""

    @property
    def connected(self) -> bool:
        """Whether neither sending nor reading fails."""
        return self._joined and not self._failures

    @property
    def status(self) -> SharingStatus:
        """Return the counts. Those by reason stay live, so a reader takes each in one step."""
        return replace(self.exchange.counts, connected=self.connected, peers=self.exchange.listener.peers)

    @property
    def warm(self) -> bool:
        """Whether this picker knows what the others know, or the wait for it was long enough."""
        return self._current or self.clock() - self._started >= _WARMUP_S

    async def run(self) -> None:
        self._started = self.clock()
        loops = {"sending": self._send, "reading": self._read, "forgetting": self._forget}
        tasks: set[asyncio.Task[None]] = {
            asyncio.create_task(self.keep("sharing", loop), name=f"sharing: {name}")
            for name, loop in loops.items()
        }
        try:
            await asyncio.wait(tasks)  # waits until cancelled
        finally:
            await _cancelled(tasks)
            await self._leave()

    async def _leave(self) -> None:
        """Send the last events, if this works at once."""
        with contextlib.suppress(LinkError, TimeoutError):
            if self.connected:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._flush()
        await self.link.close()

    # -- loops -----------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            if await self._works("send to the other pickers", self._join_and_send):
                await asyncio.sleep(self.settings.flush_interval_seconds)

    async def _join_and_send(self) -> None:
        """Join the channel if necessary, and send all waiting events in batches. A batch that could not be
        sent is sent first the next time.
        """
        await self._agree()
        channel = self.exchange.channel(self.settings.pool)
        if channel != self._channel:
            self._joined = False
            while self.exchange.listener.forget_all(now=self.clock()):  # noqa: ASYNC110 - each step does a part
                await asyncio.sleep(0)
            await self.link.join(channel)
            self._channel, self._unsent = channel, None
        await self._flush()
        self._joined = True

    async def _agree(self) -> None:
        """Take over the pool's hash secret, if that is possible; if it is another one than before, the table
        starts empty. Compare again from time to time, since a Redis may have been emptied.
        """
        if self.clock() - self._agreed_at < _COMPARE_S:
            return
        picker = self.exchange.picker
        shown = await self.link.agree(self.settings.pool, picker.caches.secret.shown())
        self._agreed_at = self.clock()
        agreed = picker.caches.secret.agreed(shown)
        if agreed is None:
            self.exchange.counts.errors["secret"] += 1
            if not self._secret_differs:
                _log.error(
                    "this picker has another hash secret than another picker of the pool, so the two share "
                    "nothing; give all pickers the same hashSecretFile (or signing key), or give none of them "
                    "one"
                )
        elif agreed != picker.caches.secret:
            picker.news.set_secret(agreed)
        self._secret_differs = agreed is None

    async def _flush(self) -> None:
        while batch := self._unsent or self.exchange.next_batch(now=self.clock()):
            self._unsent = batch
            await self.link.send(batch)
            self._unsent = None

    async def _forget(self) -> None:
        while True:
            more = self.exchange.listener.expire(now=self.clock())
            await asyncio.sleep(0 if more else self.settings.flush_interval_seconds)

    async def _read(self) -> None:
        while True:
            # A picker without endpoints could use no batch.
            readable = self._joined and (self.warm or len(self.exchange.picker.fleet.states()))
            works = not readable or await self._works("receive from the other pickers", self._read_once)
            if works and (self.warm or not readable):
                # Others send at any moment. Reading several batches together costs a fraction.
                await asyncio.sleep(self.settings.flush_interval_seconds)

    async def _read_once(self) -> None:
        batches = await self.link.read()
        started = self.clock()
        for received in batches:
            try:
                for _ in self.exchange.listener.apply(received.data, now=self.clock(), age_s=received.age_s):
                    if (spent_s := self.clock() - started) >= _PORTION_S:
                        await asyncio.sleep(spent_s)  # requests get as much time as the events
                        started = self.clock()
            except MalformedBatchError as error:
                self.exchange.counts.skipped["malformed"] += 1
                _log.warning("skipped a batch of another picker: %s", error)
        if not batches or batches[-1].age_s < _CURRENT_S:
            self._current = True

    async def _works(self, what: str, attempt: Callable[[], Awaitable[None]]) -> bool:
        """Try once, and return whether it works. A failure is followed by a pause."""
        try:
            await attempt()
        except LinkError as error:
            reason, failures = str(error).rstrip("."), self._failures[what]
            if not failures:
                _log.warning("cannot %s: %s; this picker goes on with its own knowledge", what, reason)
            self._failures[what] += 1
            self._current = True  # nothing more is known elsewhere
            self.exchange.counts.errors[error.reason] += 1
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            return False
        if self._failures.pop(what, 0):
            _log.warning("can %s again", what)
        return True


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel until all tasks have ended. A client library that is cancelled in the middle of a command may go
    on with the next one.
    """
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)


def require(settings: Sharing) -> None:
    """Raises ConfigError if the settings need something that is missing: the `redis` package, or a file."""
    if settings.redis is None:
        return
    _redis_link(settings.redis)
    for place, path in paths_of(settings.redis, under="sharing.redis"):
        read_file(path, field=place)


def make(picker: Picker, settings: Sharing, *, hub: Path | None, keep: Keep) -> SharingService | None:
    """Return the sharing of this picker: over Redis if it is configured, so that the workers of all machines
    share in the same way. Otherwise over this machine's hub, if there is one.
    """
    link: Link
    if settings.redis is not None:
        link = _redis_link(settings.redis)
    elif hub is not None:
        link = HubLink(hub)
    else:
        return None
    exchange = Exchange(picker, me=secrets.token_bytes(_SPEAKER_BYTES))
    return SharingService(exchange, link, settings=settings, keep=keep)


def _redis_link(settings: Redis) -> Link:
    try:
        from epp.sources.sharing.redis_link import RedisLink, Seal  # noqa: PLC0415 - the package is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            "sharing.redis: the redis package is not installed: pip install 'prefix-gateway[redis]'"
        ) from error
    file = settings.signing_key_file
    return RedisLink(settings, seal=Seal(read_secret(file, field=SIGNING_KEY)) if file else None)
