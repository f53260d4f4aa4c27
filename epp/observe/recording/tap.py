"""Serves the lines of a recording over the admin address, for `epp record`. This module writes no file.

It makes a line for each request that has ended, on the event loop, after the answer. If the lines are taken
too slowly, later ones are dropped and counted. It listens to the picker only while a reader asks for lines:
the first request of a reader begins the recording, and a pause without requests ends it. There is one reader
at a time, until it says that it is done or stops asking, because each line is handed out once. Called by
`app` and, through it, by the admin address.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

import msgspec

from epp.base.errors import RecordingTakenError
from epp.observe.recording.lines import Line, Opening, RecordedRequest, ServerLine, Servers, encode, packed
from epp.picker.events import Ended, Pick, PickerEvent
from epp.picker.picker import Picker

_KEY_BYTES: Final = 16
GONE_AFTER_S: Final = 15.0
"""A reader that has not asked for this long is gone."""
_MOST_WAITING_BYTES: Final = 8 * 2**20
_LINE_BYTES: Final = 600
"""Memory of a line without its chunks."""
_TENANT_BYTES: Final = 6


class Recorder:
    """`key`: the key of the hashes of tenants' names; at most 64 bytes."""

    def __init__(self, *, key: bytes, most_waiting_bytes: int = _MOST_WAITING_BYTES) -> None:
        self._key = key
        self._most_waiting_bytes = most_waiting_bytes
        self._waiting: list[RecordedRequest] = []
        self._waiting_bytes = 0
        self.dropped = 0
        """Requests that were left out because too many lines waited."""

    def ended(self, request: Pick, *, unix_now_s: float) -> None:
        chain = request.chain
        size = _LINE_BYTES + 8 * len(chain)
        if self._waiting_bytes + size > self._most_waiting_bytes:
            self.dropped += 1
            return
        self._waiting_bytes += size
        decision = request.decision
        self._waiting.append(
            RecordedRequest(
                at_unix_s=decision.at_unix_s,
                waited_s=decision.waited_s,
                kind=str(decision.kind),
                base_model=request.state.model,
                adapter=decision.adapter,
                tenant=self._hashed(decision.tenant),
                priority=decision.priority,
                stream=request.streams,
                prompt_bytes=request.prompt.size.text_bytes,
                prompt_tokens=decision.prompt_tokens,
                matched_tokens=decision.matched_tokens,
                reason=decision.reason,
                server=decision.served_by or decision.chosen,
                outcome=decision.outcome,
                status=decision.status,
                headers_s=decision.headers_s,
                ended_s=max(0.0, unix_now_s - decision.at_unix_s),
                cached_tokens=decision.cached_tokens,
                ttft_s=decision.ttft_s,
                output_tokens=decision.output_tokens,
                chunks=packed(chain),
            )
        )

    def take(self) -> list[RecordedRequest]:
        taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return taken

    def _hashed(self, tenant: str) -> str:
        if not tenant:
            return ""
        return blake2b(
            tenant.encode("utf-8", "surrogatepass"), key=self._key, digest_size=_TENANT_BYTES
        ).hexdigest()

    def check_integrity(self) -> None:
        expected = sum(_LINE_BYTES + len(line.chunks) for line in self._waiting)
        assert self._waiting_bytes == expected <= self._most_waiting_bytes


class Tap:
    def __init__(self, picker: Picker, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._picker = picker
        self._clock = clock
        self._recorder: Recorder | None = None
        """None: no reader is recording."""
        self._reader = ""
        self._asked_at = 0.0

    @property
    def on(self) -> bool:
        return self._recorder is not None

    def read(self, reader: str, last: bool) -> tuple[bytes, int]:  # noqa: FBT001 - as the admin address calls it
        """Return the lines since this reader's last question, and the number of requests that were left out
        so far. The opening line and the line of the servers come first, as in a file.

        last: the reader is done, and another one may begin. RecordingTakenError: another reader is recording.
        """
        now = self._clock()
        if self.on and now - self._asked_at > GONE_AFTER_S:
            self._end()
        if self._recorder is None:
            self._recorder = recorder_of(self._picker)
            self._reader = reader
            self._picker.subscribe(self.on_event)
            self._picker.add_recorders(1)
        elif self._reader != reader:
            raise RecordingTakenError
        self._asked_at = now
        lines: list[Line] = [opening_of(self._picker), servers_of(self._picker), *self._recorder.take()]
        dropped = self._recorder.dropped
        if last:
            self._end()
        return b"".join(map(encode, lines)), dropped

    def on_event(self, event: PickerEvent) -> None:
        if not isinstance(event, Ended) or self._recorder is None:
            return
        if self._clock() - self._asked_at > GONE_AFTER_S:
            self._end()
        else:
            self._recorder.ended(event.request, unix_now_s=time.time())

    def _end(self) -> None:
        self._picker.unsubscribe(self.on_event)
        self._picker.add_recorders(-1)
        self._recorder = None


def recorder_of(picker: Picker) -> Recorder:
    """Return a recorder that hashes the names of tenants with the picker's secret, if it has one."""
    return Recorder(key=picker.caches.secret.key or secrets.token_bytes(_KEY_BYTES))


def opening_of(picker: Picker) -> Opening:
    """Return how the picker cuts, hashes and routes now."""
    schedule = picker.table.schedule
    return Opening(
        chunk_bytes=schedule.chunk_bytes,
        later_chunk_bytes=schedule.later_chunk_bytes,
        later_from_bytes=schedule.later_from_bytes,
        hashing=picker.caches.roots.fingerprint,
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
