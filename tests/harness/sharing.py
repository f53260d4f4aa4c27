"""Pickers that really share: each has its sharing service, in the test's event loop."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from epp.config.sharing import Redis, Sharing
from epp.picker.events import Pick
from epp.picker.prefix_index.secret import HashSecret
from epp.sources.keep import Sources
from epp.sources.sharing.batches import Link
from epp.sources.sharing.exchange import OUTBOX_BYTES
from epp.sources.sharing.redis_link import RedisLink
from epp.sources.sharing.service import SharingService
from tests.harness.processes import wait_until
from tests.unit.picker.picker_questions import text
from tests.unit.sources.sharing.pickers import NO_SECRET, Replica, endpoints


class Sharer:
    """A replica that runs. Made by `sharing`."""

    def __init__(self, replica: Replica, service: SharingService) -> None:
        self.replica = replica
        self.service = service
        self.counts = replica.exchange.counts

    @property
    def peers(self) -> int:
        return self.replica.exchange.listener.peers

    def serve(self, prompt: bytes) -> Pick:
        """Route one request and end it."""
        now = time.monotonic()
        pick = self.replica.pick(prompt, now=now)
        self.replica.end(pick, now=now)
        return pick

    def pick(self, prompt: bytes) -> Pick:
        return self.replica.pick(prompt, now=time.monotonic())

    def knows(self, prompt: bytes) -> bool:
        return bool(self.replica.matched(prompt, now=time.monotonic()))

    async def learns(self, prompt: bytes, *, timeout_s: float = 60.0) -> None:
        await wait_until(
            lambda: self.knows(prompt), what="the picker knows what another picker did", timeout_s=timeout_s
        )


_numbers = iter(range(1000, 10**6))


@asynccontextmanager
async def sharing(
    link: Link,
    *,
    settings: Sharing,
    secret: HashSecret = NO_SECRET,
    outbox_bytes: int = OUTBOX_BYTES,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Sharer]:
    """Run a replica with its service, which has joined the others."""
    replica = Replica(next(_numbers), on=endpoints("abc"), outbox_bytes=outbox_bytes, secret=secret)
    service = SharingService(
        replica.exchange, link, settings=settings, keep=Sources(rng=random.Random(1)).keep, clock=clock
    )
    task = asyncio.create_task(service.run())
    try:
        yield Sharer(replica, service)
    finally:
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=60)
        assert done, (
            f"the replica does not end: {[(t.get_name(), t.get_stack()) for t in asyncio.all_tasks()]}"
        )
        replica.check()


@asynccontextmanager
async def sharing_over(
    redis: Redis,
    *,
    pool: str = "p",
    flush_interval_seconds: float = 0.02,
    secret: HashSecret = NO_SECRET,
    outbox_bytes: int = OUTBOX_BYTES,
    **fields: Any,
) -> AsyncIterator[Sharer]:
    """Run a replica that shares over this Redis. `fields` are further fields of the settings."""
    settings = Sharing(pool=pool, redis=redis, flush_interval_seconds=flush_interval_seconds, **fields)
    async with sharing(
        RedisLink(redis), settings=settings, secret=secret, outbox_bytes=outbox_bytes
    ) as sharer:
        yield sharer


async def met(*sharers: Sharer, timeout_s: float = 60.0) -> None:
    """Wait until every picker has heard of every other."""
    await wait_until(
        lambda: all(s.peers == len(sharers) - 1 and s.service.connected for s in sharers),
        what="all pickers have met",
        timeout_s=timeout_s,
    )


async def both_ways(one: Sharer, other: Sharer, *, name: str) -> None:
    """Check that each of two pickers soon knows the requests of the other."""
    one.serve(text(f"{name} of one"))
    other.serve(text(f"{name} of the other"))
    await other.learns(text(f"{name} of one"))
    await one.learns(text(f"{name} of the other"))
