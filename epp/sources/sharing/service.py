"""Runs the exchange of one picker over a link: sends and reads batches, stores and loads tables. No pick
waits for this.

There are four loops. `keep` starts each again if it fails. Only the ticking loop follows the clock; it
forgets silent peers, whatever the link does. The other loops wait for the link. After an error they try
again, with growing pauses of up to a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from epp.config.sharing import Sharing
from epp.sources.keep import Keep
from epp.sources.sharing.batches import BatchFlag, MalformedBatchError, encode_table
from epp.sources.sharing.exchange import Exchange
from epp.sources.sharing.link import Link, LinkError, Received
from epp.sources.sharing.storing import table_portions

_log = logging.getLogger("epp.sources.sharing")
_TELL: Final = "send to the other pickers"
_HEAR: Final = "receive from the other pickers"
_LOAD: Final = "load the shared table"
_STORE: Final = "store the shared table"
_BACKOFF_S: Final = (0.05, 0.2, 0.5, 1.0)
_ALONE_AFTER_S: Final = 0.5
"""Other pickers answer a new picker at once. A picker that has received nothing after this time assumes that
it is the first one."""
_JOIN_TURN_S: Final = 0.5
_JOINING_S: Final = 15.0
"""After this time, a table that another picker stores brings nothing new."""
_LAST_WORDS_S: Final = 1.0
_CANCEL_AGAIN_S: Final = 0.2


@dataclass(slots=True)
class LinkCounts:
    sent_batches: int = 0
    sent_bytes: int = 0
    read_bytes: int = 0
    malformed: int = 0
    stored_tables: int = 0
    loaded_tables: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class SharingService:
    """Call `run`. When it is cancelled, it closes the link."""

    def __init__(
        self,
        exchange: Exchange,
        link: Link,
        *,
        settings: Sharing,
        keep: Keep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.exchange = exchange
        self._link = link
        self._settings = settings
        self._keep = keep
        self._clock = clock
        self._channel = exchange.channel(settings.pool)
        self._work = asyncio.Event()
        self._store_now = asyncio.Event()
        self._joined = asyncio.Event()
        self._loadable = asyncio.Event()
        """Set when there are endpoints that a table can be about, or when the wait for them is over."""
        self._flags = 0
        self._unsent: bytes | None = None
        self._started = clock()
        self._joining = True
        self._asked_at = float("inf")
        """When this picker first announced to the others that it joins."""
        self._agreed_at = float("-inf")
        """When the hash secret was last compared with the pool's."""
        self._secret_differs = False
        self._warm = asyncio.Event()
        self._load_tried = False
        self._away: set[str] = set()
        self.counts = LinkCounts()

    @property
    def connected(self) -> bool:
        """Whether neither sending nor reading fails."""
        return self._joined.is_set() and not self._away

    @property
    def warm(self) -> bool:
        """Whether the others' table has been loaded, or there is none, or the wait for it was long enough."""
        return self._warm.is_set()

    async def warmed(self) -> None:
        await self._warm.wait()

    async def run(self) -> None:
        loops = (
            ("ticking", self._tick),
            ("saying", self._send),
            ("reading", self._read),
            ("storing", self._store),
        )
        tasks: set[asyncio.Task[None]] = {
            asyncio.create_task(self._keep("sharing", loop), name=f"sharing: {name}") for name, loop in loops
        }
        try:
            await asyncio.wait(tasks)  # waits until cancelled
        finally:
            await _cancelled(tasks)
            await self._leave()

    async def _leave(self) -> None:
        """Send the last events, and store the table if no other picker has it. Only if this works at once."""
        with contextlib.suppress(LinkError, TimeoutError):
            if self.connected:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._flush()
                    if not self.exchange.listener.peers:
                        await self._write_table()
        await self._link.close()

    # -- loops -----------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            exchange, now = self.exchange, self._clock()
            exchange.listener.expire(now=now)
            if exchange.listener.joining:
                exchange.listener.joining = False
                self._store_now.set()
            if self._joining and now - self._started > _JOINING_S:
                self._joining = False
            if not self.warm and self._waited_enough(now - self._started):
                self._warm.set()
            if len(exchange.picker.fleet) or self.warm:
                self._loadable.set()
            self._work.set()
            await asyncio.sleep(self._settings.flush_interval_seconds)

    def _waited_enough(self, waited_s: float) -> bool:
        alone = self._joined.is_set() and not self.exchange.listener.peers and waited_s > _ALONE_AFTER_S
        return alone or bool(self._away) or waited_s >= self._settings.warmup_seconds

    async def _send(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self._retrying(_TELL, self._join_and_send)

    async def _join_and_send(self) -> None:
        """Join the channel if necessary, and send all waiting events in batches. A batch that could not be
        sent is sent first the next time.
        """
        exchange = self.exchange
        if _TELL in self._away:
            exchange.speaker.start_fresh()
        await self._agree()
        channel = exchange.channel(self._settings.pool)
        if channel != self._channel or not self._joined.is_set():
            if channel != self._channel:
                self._joined.clear()
                exchange.leave(now=self._clock())
                self._channel, self._unsent = channel, None
            await self._link.join(channel)
            await self._flush()
            self._joined.set()
        await self._flush()

    async def _agree(self) -> None:
        """Compare the hash secret with the pool's: at first, and again from time to time, since a Redis may
        have been emptied.
        """
        if self._clock() - self._agreed_at < self._settings.snapshot_interval_seconds:
            return
        shown = await self._link.agree(self._settings.pool, self.exchange.picker.caches.secret.shown())
        self._agreed_at = self._clock()
        differs = not self.exchange.agree(shown)
        if differs:
            self.counts.errors["secret"] += 1
        if differs and not self._secret_differs:
            _log.error(
                "this picker has another hash secret than another picker of the pool, so the two share "
                "nothing; give all pickers the same hashSecretFile (or signing key), or give none of them one"
            )
        self._secret_differs = differs

    async def _flush(self) -> None:
        exchange = self.exchange
        while True:
            if self._unsent is None:
                flags, self._flags = self._flags | (BatchFlag.JOINING if self._joining else 0), 0
                urgent = bool(flags & BatchFlag.STORED)
                self._unsent = exchange.next_batch(now=self._clock(), flags=flags, urgent=urgent)
                if self._unsent is None:
                    return
            sent_at = self._clock()
            await self._link.send(self._unsent)
            if self._joining:
                self._asked_at = min(self._asked_at, sent_at)
            self.counts.sent_batches += 1
            self.counts.sent_bytes += len(self._unsent)
            self._unsent = None

    async def _read(self) -> None:
        await self._joined.wait()
        await self._loadable.wait()
        if not self._load_tried:  # if the table ended this loop, it is not tried again
            self._load_tried = True
            await self._retrying(_LOAD, self._load)
        while True:
            await self._joined.wait()
            await self._retrying(_HEAR, self._read_once)
            # Others send at any moment. Reading several batches together costs a fraction.
            await asyncio.sleep(self._settings.flush_interval_seconds)

    async def _read_once(self) -> None:
        for received in await self._link.read():
            self.counts.read_bytes += len(received.data)
            try:
                await self._apply(received)
            except MalformedBatchError as error:
                self.counts.malformed += 1
                _log.warning("skipped a batch of another picker: %s", error)
        # A table that was stored before the others knew of us lacks the later events,
        # which refer to batches that we never received.
        if self._joining and self.exchange.listener.stored_at >= self._asked_at:
            await self._load()
            self._joining = False
            self._warm.set()

    async def _apply(self, received: Received) -> None:
        """Apply one batch in portions. After each portion requests get as much time as the portion took."""
        started = self._clock()
        for _ in self.exchange.listener.apply(received.data, now=started, age_s=received.age_s):
            await asyncio.sleep(self._clock() - started)
            started = self._clock()

    async def _load(self) -> None:
        """Load the stored table, if there is one, with a pause after each portion."""
        table = await self._link.stored()
        if table is None:
            return
        try:
            for _ in self.exchange.listener.load(table.data, now=self._clock(), age_s=table.age_s):
                await asyncio.sleep(0)
        except MalformedBatchError as error:
            self.counts.malformed += 1
            _log.warning("skipped the stored table: %s", error)
            return
        self.counts.loaded_tables += 1

    async def _store(self) -> None:
        """Store the table for pickers that join: when one joins, and from time to time if it is our turn."""
        while True:
            turn, period_s = "join", _JOIN_TURN_S
            try:
                async with asyncio.timeout(self._settings.snapshot_interval_seconds):
                    await self._store_now.wait()
            except TimeoutError:
                turn, period_s = "store", self._settings.snapshot_interval_seconds
            self._store_now.clear()
            if self._joined.is_set() and self.warm:  # otherwise this picker itself waits for a table
                await self._retrying(_STORE, functools.partial(self._store_in_turn, turn, period_s))

    async def _store_in_turn(self, turn: str, period_s: float) -> None:
        if await self._link.take_turn(turn, period_s=period_s):
            await self._write_table()
            self.exchange.speaker.start_fresh()
            self._flags |= BatchFlag.STORED
            self._work.set()

    async def _write_table(self) -> None:
        portions = []
        for portion in table_portions(self.exchange.picker):
            portions.append(portion)
            await asyncio.sleep(0)
        data = encode_table(portions)
        await self._link.store(data)
        self.counts.stored_tables += 1

    async def _retrying(self, what: str, attempt: Callable[[], Awaitable[None]]) -> None:
        """Try again until it works. Attempts to load or store a table are not repeated."""
        for n in range(2**62):
            try:
                await attempt()
            except LinkError as error:
                self.counts.errors[error.reason] += 1
                if what not in self._away:
                    self._away.add(what)
                    _log.warning(
                        "cannot %s: %s; this picker goes on with its own knowledge",
                        what,
                        str(error).rstrip("."),
                    )
                await asyncio.sleep(_BACKOFF_S[min(n, len(_BACKOFF_S) - 1)])
                if what in (_LOAD, _STORE):
                    self._away.discard(what)
                    return
            else:
                if what in self._away:
                    self._away.discard(what)
                    _log.warning("can %s again", what)
                return


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel until all tasks have ended. A client library that is cancelled in the middle of a command may go
    on with the next one.
    """
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
