"""A picker in exact mode on the test's event loop. It follows servers that publish KV events. Only
the test asks it for picks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from epp.base.types import Endpoint
from epp.config.policy import DEFAULT_POLICY
from epp.picker.picker import Picker
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.routed_prompts import RoutedPrompts
from epp.sources.kvevents.service import ExactService
from epp.sources.kvevents.sockets import EventSource


@dataclass(frozen=True, slots=True)
class Follower:
    picker: Picker
    service: ExactService
    exact: Exact


@contextlib.asynccontextmanager
async def following_picker(
    endpoints: Sequence[Endpoint], settings: ModelSettings, *, topic: str = ""
) -> AsyncIterator[Follower]:
    """Run a picker. The endpoints' `kv_events` and `kv_replay` say where to listen. At the end the integrity
    of all parts is checked.
    """
    queue = RoutedPrompts(max_prompts=100, max_bytes=10**7)
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    picker.subscribe(queue.on_event)
    picker.set_endpoints(endpoints, now=0.0)
    exact = Exact({"": settings}, max_blocks=10**5, max_chunks=10**4)
    service = ExactService(
        picker,
        queue,
        lambda: exact,
        topic=topic,
        source=lambda e: EventSource(e.model, e.incarnation, e.kv_events, e.kv_replay),
        clock=asyncio.get_running_loop().time,
    )
    service.set_endpoints(endpoints)
    task = asyncio.create_task(service.run())
    try:
        yield Follower(picker, service, exact)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        exact.check_integrity()
        picker.check_integrity()
