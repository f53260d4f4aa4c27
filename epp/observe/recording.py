"""Defines the three kinds of JSON lines of a recording, and serves them over the admin address, for `epp
record`. This module writes no file.

A recording begins with a `recording` line, which says how prompts were cut into chunks and which policy
routed. A `servers` line describes the fleet from then on. A `request` line describes one request that has
ended. No line has text of a prompt, an answer or a header. Prompts appear as the keyed hashes of their
chunks: equal hashes mean equal beginnings, and nothing else can be read from them. Tenants appear as keyed
hashes too. `replay` reads the lines.

`Tap` makes a line for each request that has ended, on the event loop, after the answer. The lines are
numbered, and a reader asks for those from a number on, so any number of readers may read. If the lines are
read too slowly, the oldest are dropped, and the reader gets their number. It listens to the picker only while
somebody reads: the first question begins the recording, and a pause without questions ends it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

from epp.base.types import pack_hashes
from epp.picker.events import Ended, Pick, PickerEvent
from epp.picker.picker import Picker

VERSION: Final = 1
MOST_PROMPT_BYTES: Final = 2**26
"""No gateway accepts a larger body."""
_ChunkBytes = Annotated[int, Meta(ge=1, le=2**24)]
_Bytes = Annotated[int, Meta(ge=0, le=MOST_PROMPT_BYTES)]
_TokenCount = Annotated[int, Meta(ge=0, le=2**30)]
_UnixSeconds = Annotated[float, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(ge=0, le=2**31)]


class Opening(Struct, frozen=True, tag_field="line", tag="recording", kw_only=True):
    """How the picker cut and routed the requests that follow."""

    version: int = VERSION
    chunk_bytes: _ChunkBytes
    later_chunk_bytes: _ChunkBytes
    later_from_bytes: Annotated[int, Meta(ge=0, le=2**32)]
    hashing: str
    """Names the schedule and the secret of the hashes. Hashes can be compared only if these are equal."""
    policy: dict[str, Any]
    """The policy, as `epp check` prints it."""


class ServerLine(Struct, frozen=True, kw_only=True):
    """One endpoint, as far as the picker knew it."""

    name: str
    model: str = ""
    capacity_tokens: Annotated[int, Meta(ge=0, le=2**36)] | None = None
    prefill_tokens_per_s: Annotated[float, Meta(ge=0, le=2**31)] | None = None


class Servers(Struct, frozen=True, tag_field="line", tag="servers", kw_only=True):
    """The fleet from this line on."""

    servers: Annotated[tuple[ServerLine, ...], Meta(max_length=4096)]


class RecordedRequest(Struct, frozen=True, tag_field="line", tag="request", kw_only=True, omit_defaults=True):
    """One request that has ended. Times are seconds; `at_unix_s` is the moment of the pick."""

    at_unix_s: _UnixSeconds
    waited_s: _Seconds = 0.0
    """How long flow control had held the request."""
    kind: str
    base_model: str = ""
    adapter: str = ""
    tenant: str = ""
    """A keyed hash. Empty: no tenant was named."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31)] = 0
    stream: bool = False
    prompt_bytes: _Bytes
    prompt_tokens: _TokenCount
    """The picker's estimate."""
    matched_tokens: _TokenCount = 0
    reason: str
    server: str
    """The server that really served the request, if known."""
    outcome: str
    status: int | None = None
    headers_s: _Seconds | None = None
    ended_s: _Seconds
    cached_tokens: _TokenCount | None = None
    """The number that the server itself reported. This field and the next two exist only for sampled
    answers."""
    ttft_s: _Seconds | None = None
    output_tokens: _TokenCount | None = None
    chunks: bytes = b""
    """The chain: eight bytes for each full chunk, little-endian. JSON shows them as base64."""


Line = Opening | Servers | RecordedRequest

_DECODER: Final = msgspec.json.Decoder(Line)


def encode(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def decode(text: bytes) -> Line:
    """A ValueError names the field at fault."""
    try:
        line: Line = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return line


GONE_AFTER_S: Final = 15.0
"""If nobody has asked for this long, the recording ends."""
_MOST_BYTES: Final = 8 * 2**20
_TENANT_BYTES: Final = 6


class LinesRead(NamedTuple):
    """Lines, the number of lines before them that were dropped unread, and the number of the next line."""

    lines: bytes
    left_out: int
    following: int


@dataclass(eq=False)
class Tap:
    picker: Picker
    clock: Callable[[], float] = time.monotonic
    most_bytes: int = _MOST_BYTES
    on: bool = field(init=False, default=False)
    """Whether somebody reads, so that requests are recorded."""
    _asked_at: float = field(init=False, default=0.0)
    _lines: deque[bytes] = field(init=False, default_factory=deque)
    _lines_bytes: int = field(init=False, default=0)
    _following: int = field(init=False, default=1)

    def read(self, since: int | None) -> LinesRead:
        """Return the lines about picker and servers, then those of the requests from number `since` on. None:
        none yet.
        """
        self._asked_at = self.clock()
        if not self.on:
            self.on = True
            self.picker.subscribe(self.on_event)
            self.picker.recorders += 1
        first = self._following - len(self._lines)
        if since is None:
            since = self._following
        elif since > self._following:  # the number comes from an earlier process
            since = first
        start = max(since, first)
        head = [encode(opening_of(self.picker)), encode(servers_of(self.picker))]
        lines = b"".join([*head, *islice(self._lines, start - first, None)])
        return LinesRead(lines, start - since, self._following)

    def on_event(self, event: PickerEvent) -> None:
        if not isinstance(event, Ended):
            return
        if self.clock() - self._asked_at > GONE_AFTER_S:
            self._end()
            return
        key = self.picker.caches.secret.key
        line = encode(line_of(event.pick, unix_now_s=time.time(), key=key))
        self._lines.append(line)
        self._following += 1
        self._lines_bytes += len(line)
        while self._lines_bytes > self.most_bytes:
            self._lines_bytes -= len(self._lines.popleft())

    def _end(self) -> None:
        self.on = False
        self._lines.clear()
        self._lines_bytes = 0
        self.picker.unsubscribe(self.on_event)
        self.picker.recorders -= 1


def line_of(pick: Pick, *, unix_now_s: float, key: bytes) -> RecordedRequest:
    """Return what a recording keeps of a request. key: of the hashes of tenants' names, at most 64
    bytes: the picker's secret, so that nobody can guess names.
    """
    decision, tenant = pick.decision, ""
    if decision.tenant:
        name = decision.tenant.encode("utf-8", "surrogatepass")
        tenant = blake2b(name, key=key, digest_size=_TENANT_BYTES).hexdigest()
    return RecordedRequest(
        at_unix_s=decision.at_unix_s,
        waited_s=decision.waited_s,
        kind=str(decision.kind),
        base_model=pick.state.model,
        adapter=decision.adapter,
        tenant=tenant,
        priority=decision.priority,
        stream=pick.streams,
        prompt_bytes=pick.prompt.size.text_bytes,
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
        chunks=pack_hashes(pick.chain),
    )


def opening_of(picker: Picker) -> Opening:
    """Return how the picker cuts, hashes and routes now."""
    schedule = picker.caches.table.schedule
    return Opening(
        chunk_bytes=schedule.size_bytes,
        later_chunk_bytes=schedule.later_size_bytes,
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
