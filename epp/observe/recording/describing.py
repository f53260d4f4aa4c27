"""Describes the policy and the servers of the picker as lines of a recording. Called by `tap`."""

from __future__ import annotations

import secrets
from typing import Final

import msgspec

from epp.observe.recording.lines import Opening, ServerLine, Servers
from epp.observe.recording.recorder import Recorder
from epp.picker.picker import Picker

_KEY_BYTES: Final = 16


def recorder_of(picker: Picker) -> Recorder:
    """Return a recorder that hashes the names of tenants with the picker's secret, if it has one."""
    return Recorder(key=picker.secret.key or secrets.token_bytes(_KEY_BYTES))


def opening_of(picker: Picker) -> Opening:
    """Return how the picker cuts, hashes and routes now."""
    schedule = picker.table.schedule
    return Opening(
        chunk_bytes=schedule.chunk_bytes,
        later_chunk_bytes=schedule.later_chunk_bytes,
        later_from_bytes=schedule.later_from_bytes,
        hashing=picker.roots.fingerprint,
        policy=msgspec.to_builtins(picker.policy),
    )


def servers_of(picker: Picker) -> Servers:
    """Return the endpoints, with the numbers that they stated or that were learned."""
    return Servers(
        servers=tuple(
            ServerLine(
                name=state.endpoint.name,
                model=state.model,
                capacity_tokens=state.metrics.capacity_tokens if state.metrics else None,
                prefill_tokens_per_s=state.tokens_per_s,
            )
            for state in picker.fleet.states()
        )
    )
