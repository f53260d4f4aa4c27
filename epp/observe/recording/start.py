"""Makes a recording for `app`: describes the policy and the servers of the picker as lines."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import msgspec

from epp.config.settings import Recording
from epp.observe.recording.file import RecordingFile
from epp.observe.recording.lines import Opening, Server, Servers
from epp.observe.recording.recorder import Recorder
from epp.observe.recording.service import RecordingService
from epp.picker.picker import Picker

_KEY_BYTES: Final = 16


def make(picker: Picker, settings: Recording, *, worker: int, workers: int) -> RecordingService:
    """Return the service. Its thread runs from now on."""
    path = Path(settings.file)
    if workers > 1:
        path = path.with_name(f"{path.name}.w{worker}")
    service = RecordingService(
        recorder_of(picker),
        RecordingFile(path, max_bytes=settings.max_bytes),
        opening=lambda: opening_of(picker),
        servers=lambda: servers_of(picker),
    )
    picker.subscribe(service.on_event)
    picker.add_recorders(1)
    return service


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
            Server(
                name=state.endpoint.name,
                model=state.model,
                capacity_tokens=state.metrics.capacity_tokens if state.metrics else None,
                prefill_tokens_per_s=state.tokens_per_s,
            )
            for state in picker.fleet.states()
        )
    )
