"""Makes a line for each request that has ended, and keeps the lines until they are taken.

Runs on the event loop, after the answer. It keeps one struct for each request, within a bound of memory. If
lines are taken too slowly, later ones are dropped and counted. Pure: it knows no file and no clock. `tap`
takes the lines.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from epp.observe.recording.lines import RecordedRequest, packed
from epp.picker.events import Pick

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
