"""Snapshots of made-up endpoints, for the tests of scheduling."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from msgspec.structs import replace

from epp.base.types import Address, Endpoint, EndpointName
from epp.picker.scheduling.schedule import Weighed, loading_s
from epp.picker.scheduling.snapshot import Roster, SchedulingRequest, Snapshot


@dataclass
class SeenEndpoint:
    """One endpoint as a snapshot shows it."""

    name: str
    cached: int = 0
    backlog: float = 0.0
    in_flight: int = 0
    waiting: float = 0
    kv_usage: float = 0.0
    rate: float = 1000.0
    has_adapter: bool = False
    free_slot: bool = False


UNKNOWN = nan


def snapshot(seen: Sequence[SeenEndpoint], *, adapter: str = "") -> Snapshot:
    roster = Roster(
        [Endpoint(EndpointName(s.name), Address(f"10.0.0.{n + 1}", 8000)) for n, s in enumerate(seen)]
    )
    return Snapshot(
        roster=roster,
        slots=roster.everyone,
        undone_tokens=np.array([s.backlog for s in seen], dtype=float),
        rate=np.array([s.rate for s in seen], dtype=float),
        in_flight=np.array([s.in_flight for s in seen], dtype=float),
        waiting=np.array([s.waiting for s in seen], dtype=float),
        kv_usage=np.array([s.kv_usage for s in seen], dtype=float),
        has_adapter=np.array([s.has_adapter for s in seen]) if adapter else None,
        free_slot=np.array([s.free_slot for s in seen]) if adapter else None,
    )


def request_of(
    seen: Sequence[SeenEndpoint],
    *,
    prompt: int = 1000,
    session: str = "",
    beginning: int = 0,
    prefix: int = 0,
    at: float = 0.0,
) -> SchedulingRequest:
    return SchedulingRequest(
        at=at,
        prompt_tokens=prompt,
        cached_tokens=np.array([s.cached for s in seen], dtype=float),
        session=session,
        beginning=beginning,
        prefix=prefix,
    )


def weighed(
    seen: Sequence[SeenEndpoint],
    *,
    adapter: str = "",
    load_s: float = 0.5,
    unreported_picks: float = 0.0,
    **of_request: Any,
) -> Weighed:
    """of_request: see `request_of`."""
    shown = replace(snapshot(seen, adapter=adapter), unreported_picks=unreported_picks)
    request = request_of(seen, **of_request)
    return Weighed(
        seen=shown,
        request=request,
        uncached_tokens=request.prompt_tokens - request.cached_tokens,
        load_s=loading_s(shown, load_s=load_s),
    )
