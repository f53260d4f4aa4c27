"""Sends this picker's events to the others: events enter a bounded queue as they happen, and are cut into
batches.

Nothing waits here. When the link is slow or away, the queue grows to its limit. From then on the oldest
events are dropped and counted. The next batch then makes the others forget all requests that were announced
before, because the events of their ends may be among the dropped ones.

Invariants: `_bytes` is the sum of the sizes of the events in the queue. A request has a number from its first
event until its last.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from xxhash import xxh3_64_intdigest

from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.events import (
    Began,
    Cut,
    Ended,
    Fatal,
    Hangs,
    MadeState,
    Moved,
    Pick,
    PickerEvent,
    PrefillBegan,
    PrefillEnded,
    PrefillJob,
    Proved,
    Restarted,
)
from epp.picker.gate import Gate
from epp.picker.phases import Phase
from epp.sources.sharing import batches
from epp.sources.sharing.batches import (
    HASH_BYTES,
    MOST_FLOW_ROWS,
    MOST_HANGING,
    MOST_TOKENS,
    Batch,
    BatchFlag,
    Event,
    FlowRow,
    HeldChain,
    Kept,
    SharedOver,
    age_ms,
    encode,
)
from epp.sources.sharing.dictionary import SpeakerDictionary

_EVENT_BYTES: Final = 64
"""Assumed memory of an event besides its hashes."""
_BATCH_BYTES: Final = 256 * 1024
_PREFILL_KEPT: Final = {"computed": Kept.COMPUTED, "lost": Kept.LOST, "detached": Kept.DETACHED}
_MOST_FLOW_ROWS: Final = 16 * MOST_FLOW_ROWS
"""Most rows that wait to be sent. If there are more, everything is sent again."""


_Kind = Literal["began", "moved", "proved", "over", "held", "restarted", "hangs", "cut", "fatal", "made"]


_SERVERS_NEWS: Final[dict[type, _Kind]] = {Restarted: "restarted", Hangs: "hangs", Cut: "cut"}


@dataclass(slots=True, eq=False)
class _Row:
    """One event in the queue. It has plain values, since the request may change or disappear meanwhile."""

    kind: _Kind
    at: float
    number: int = 0
    name: str = ""
    identity: int = 0
    tokens: int = 0
    adapter: str = ""
    kept: Kept = Kept.LOST
    failed: bool = False
    chain: array[int] | None = None

    @property
    def size_bytes(self) -> int:
        return _EVENT_BYTES + HASH_BYTES * len(self.chain or ())


def identity_of(state: EndpointState) -> int:
    """Return a hash of 32 bits that identifies the process of an endpoint, as far as the source shows. It is
    the same on all pickers.
    """
    endpoint = state.endpoint
    return (
        xxh3_64_intdigest(f"{endpoint.incarnation}\0{endpoint.model}".encode("utf-8", "surrogatepass")) >> 32
    )


class Speaker:
    def __init__(self, *, speaker: bytes, limit_bytes: int, gate: Gate | None = None) -> None:
        self._gate = gate
        self._flow_rows: deque[FlowRow] = deque()
        self._speaker = speaker
        self._limit_bytes = limit_bytes
        self._rows: deque[_Row] = deque()
        self._bytes = 0
        self._numbers: dict[Pick | PrefillJob, int] = {}
        """The work of a prefill server for a request has its own number: to other pickers it is a request to
        that server."""
        self._newest = 0
        self._batches = 0
        self._dictionary = SpeakerDictionary()
        self._fresh = self._forget = True
        self.dropped = 0
        """Number of events for which the queue had no room."""
        self.num_sent = 0

    @property
    def waiting(self) -> int:
        """Number of events in the queue, and of changes in flow control."""
        return len(self._rows) + len(self._flow_rows)

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    def start_fresh(self) -> None:
        """Another picker joined or missed a batch, so the next batch must not refer to an earlier one."""
        self._fresh = True

    def on_event(self, event: PickerEvent) -> None:
        """Queue what others need to know. `Ended` says how an answer ended, so `Answered` is not sent."""
        match event:
            case Began(at, request):
                self._give_number(request)
                self._add_request("began", at, request)
            case Proved(at, work):
                self._prove(at, work)
            case Ended(at, request):
                number = self._numbers.pop(request, 0)
                self._add(_Row(kind="over", at=at, number=number, kept=_kept(request), failed=request.failed))
            case Moved(at, request):
                self._add_request("moved", at, request)
            case PrefillBegan(at, work, chain, adapter):
                row = _row_of("began", at, work.state, chain=array("Q", chain))
                row.number, row.tokens, row.adapter = self._give_number(work), work.booking.tokens, adapter
                self._add(row)
            case PrefillEnded(at, work, outcome, failed):
                number = self._numbers.pop(work, 0)
                self._add(_Row(kind="over", at=at, number=number, kept=_PREFILL_KEPT[outcome], failed=failed))
            case Restarted(at, server) | Hangs(at, server) | Cut(at, server):
                self._add(_row_of(_SERVERS_NEWS[type(event)], at, server))
            case Fatal(at, body_hash, strikes):
                self._add(_Row(kind="fatal", at=at, number=body_hash, tokens=strikes))
            case MadeState(at, server, id_hash):
                row = _row_of("made", at, server)
                row.number = id_hash
                self._add(row)

    def gather_flow(self, *, anew: bool = False) -> None:
        """Collect the reports of this picker's flow control. anew: collect all of them, because the others
        have none yet.
        """
        if self._gate is None:
            return
        for model, row in self._gate.reports(anew=anew):
            tokens = min(row.let_go_tokens, MOST_TOKENS)
            self._flow_rows.append((model, row.priority, row.tenant, False, tokens, *row[3:]))
        if len(self._flow_rows) > _MOST_FLOW_ROWS:
            self._flow_rows.clear()
            self._fresh = True

    def _give_number(self, work: Pick | PrefillJob) -> int:
        self._newest += 1
        self._numbers[work] = self._newest
        return self._newest

    def _add_request(self, kind: Literal["began", "moved"], at: float, request: Pick) -> None:
        row = _row_of(kind, at, request.state, chain=array("Q", request.guess.chain))
        row.number = self._numbers.get(request, 0)
        row.tokens, row.adapter = request.booking.tokens, request.decision.adapter
        self._add(row)

    def _prove(self, at: float, work: Pick | PrefillJob) -> None:
        number = self._numbers.get(work)
        if number is not None:
            self._add(_Row(kind="proved", at=at, number=number))
        elif work.guess.chain:  # the others know nothing of this request any more
            self._add(_row_of("held", at, work.state, chain=array("Q", work.guess.chain)))

    def _add(self, row: _Row) -> None:
        self._rows.append(row)
        self._bytes += row.size_bytes
        while self._bytes > self._limit_bytes:
            self._bytes -= self._rows.popleft().size_bytes
            self.dropped += 1
            self._forget = True

    def batch(self, *, now: float, hello: int = 0, flags: int = 0) -> bytes:
        """Return the next batch, with as many events as fit. Without events it is a sign of life."""
        if self._dictionary.full:
            self._fresh = True
        if self._fresh:
            self._dictionary = SpeakerDictionary()
            flags |= BatchFlag.FRESH
            self.gather_flow(anew=True)
        if self._forget:
            flags |= BatchFlag.FORGET
        self._fresh = self._forget = False
        events: list[Event] = []
        faults: dict[str, list[int]] = {"hangs": [], "cut": []}
        hanging, cut = faults.values()
        fatal: list[tuple[int, int]] = []
        proved: list[int] = []
        made: list[tuple[int, int]] = []
        taken = 0
        while self._rows and taken < _BATCH_BYTES and len(hanging) + len(cut) + len(fatal) < MOST_HANGING:
            row = self._rows.popleft()
            taken += row.size_bytes
            if row.kind == "proved":
                proved.append(self._newest - row.number)
            elif row.kind in faults:
                faults[row.kind].append(self._dictionary.name(row.name, row.identity))
            elif row.kind == "made":
                made.append((row.number, self._dictionary.name(row.name, row.identity)))
            elif row.kind == "fatal":
                fatal.append((row.number, row.tokens))
            else:
                events.append(self._event(row, now=now))
        self._bytes -= taken
        self.num_sent += len(events) + len(hanging) + len(cut) + len(fatal) + len(proved) + len(made)
        self._batches += 1
        return encode(
            Batch(
                speaker=self._speaker,
                number=self._batches,
                hello=hello,
                flags=flags,
                newest=self._newest,
                names=self._dictionary.new_names(),
                events=events,
                hanging=hanging,
                cut=cut,
                fatal=fatal,
                flow=[self._flow_rows.popleft() for _ in range(min(MOST_FLOW_ROWS, len(self._flow_rows)))],
                proved=proved,
                made=made,
            )
        )

    def _event(self, row: _Row, *, now: float) -> Event:
        age = age_ms(now, row.at)
        if row.kind == "over":
            return SharedOver(
                ago=self._newest - row.number, age_ms=age, kept=int(row.kept), failed=row.failed
            )
        endpoint = self._dictionary.name(row.name, row.identity)
        if row.kind == "restarted":
            return batches.SharedRestarted(age_ms=age, endpoint=endpoint)
        head, tail = self._dictionary.chain(row.chain or ())
        if row.kind == "held":
            return HeldChain(age_ms=age, endpoint=endpoint, head=head, tail=tail)
        made = batches.SharedBegan if row.kind == "began" else batches.SharedMoved
        return made(
            ago=self._newest - row.number,
            age_ms=age,
            endpoint=endpoint,
            tokens=min(row.tokens, MOST_TOKENS),
            adapter=self._dictionary.name(row.adapter, 0) + 1 if row.adapter else 0,
            head=head,
            tail=tail,
        )

    def check_integrity(self) -> None:
        assert self._bytes == sum(row.size_bytes for row in self._rows)
        assert self._bytes <= self._limit_bytes
        assert all(0 < number <= self._newest for number in self._numbers.values())


def _row_of(kind: _Kind, at: float, state: EndpointState, *, chain: array[int] | None = None) -> _Row:
    return _Row(kind=kind, at=at, name=state.endpoint.name, identity=identity_of(state), chain=chain)


def _kept(request: Pick) -> Kept:
    if request.phase is Phase.DETACHED:
        return Kept.DETACHED
    if not request.guess.proven:
        return Kept.LOST
    return Kept.COMPUTED if request.computed else Kept.ABORTED
