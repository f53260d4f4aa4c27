"""Applies the events of other pickers to this picker's table and loads.

For every other picker, owns the names and chains that its batches refer to, and its open requests.
Invariants: an open request of another picker holds exactly one booking here. The booking is released when the
request ends, when the other picker says to forget its requests, when one of its batches is missing (the end
may have been in it), or when the picker was silent for the timeout. An event from before an endpoint lost its
cache never enters the table.

A chain costs CPU by its length, even if few bytes name it. So batches and tables are applied in portions, and
requests are served between the portions. If a batch names more chunks than the work of any picker needs, its
further chains are left out.

Pure: `now` is the caller's monotonic time, and `age_s` is how long a batch was on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain as chained
from typing import Final, cast

from epp.base.types import ChunkHash, EndpointName
from epp.picker.endpoints.endpoint_state import Booking, EndpointState
from epp.picker.events import Guess
from epp.picker.flow.elsewhere import Row
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.picker.prefix_index.eviction import charge
from epp.picker.prefix_index.servers import clear_endpoint, resize
from epp.sources.sharing import batches, bookings
from epp.sources.sharing.batches import BatchFlag, Event, Kept, MalformedBatchError
from epp.sources.sharing.dictionary import ListenerDictionary
from epp.sources.sharing.speaker import identity_of

_MOST_OPEN: Final = 100_000
"""Most open requests of one other picker. Further ones are ignored."""
_PORTION_CHUNKS: Final = 4_096
"""Chunks that are applied in one portion, in some milliseconds."""
_EVENT_CHUNKS: Final = 16
"""The cost of an event besides its chain, in chunks."""
_BATCH_CHUNKS: Final = 2**18
"""Most chunks of one batch: 260 MB of prompts by the default policy."""
_SAME_RESTART_S: Final = 5.0
"""Pickers scrape at different moments. So a restart that another picker reports within this time of our own
observation is the same restart."""


@dataclass(slots=True, eq=False)
class _OpenPick:
    """An open request of another picker."""

    state: EndpointState
    booking: Booking
    guess: Guess
    booked: bool
    """Whether it counts as load here."""
    reports: bool
    """Whether its picker reports when the prompt is computed. One of an older version does not."""


@dataclass(slots=True, eq=False)
class _Peer:
    heard_at: float
    number: int = 0
    hello: int = 0
    synced: bool = False
    """Whether no batch is missing since its last fresh one."""
    asked: bool = False
    """Whether it was asked to start a new dictionary, because a batch is missing."""
    dictionary: ListenerDictionary = field(default_factory=ListenerDictionary)
    open: dict[int, _OpenPick] = field(default_factory=dict)
    reports: bool = False
    """Whether it reports when prompts are computed."""


@dataclass(slots=True)
class ReceivedCounts:
    batches: int = 0
    events: int = 0
    unresolved: int = 0
    """Events left out because they refer to missing batches."""
    stale: int = 0
    """Chains left out because their endpoint lost its cache after they were sent, or is
    another process now."""
    unknown_endpoints: int = 0
    """Events left out because this picker does not know their endpoints."""
    excessive: int = 0
    """Chains left out because their batch named too many chunks."""
    gaps: int = 0


class Listener:
    def __init__(self, picker: Picker, *, me: bytes, timeout_s: float, gate: Gate | None = None) -> None:
        """gate: gets the news about requests that wait at other pickers. None: they are ignored."""
        self._picker = picker
        self._gate = gate
        self._me = me
        self._timeout_s = timeout_s
        self._peers: dict[bytes, _Peer] = {}
        self._floors: dict[EndpointName, float] = {}
        """The servers' counters of prompt tokens when the loaded table was stored. Each is kept until the
        endpoint's own counter is seen."""
        self.counts = ReceivedCounts()
        self._spent = 0
        """Chunks applied in this portion."""
        self._budget = 0
        """Chunks that this batch may still name."""
        self.hello = 0
        """Goes into every batch. Changes when this picker has missed something."""
        self.start_fresh = False
        """Another picker joined or missed something, so the speaker must start a new dictionary. The code
        that does so resets this flag."""
        self.joining = False
        """The sender of the last batch waits for a table. The code that stores one resets this flag."""
        self.stored_at = float("-inf")
        """When another picker last reported that it had stored its table."""

    @property
    def peers(self) -> int:
        return len(self._peers)

    def forget_all(self, *, now: float) -> None:
        """Forget everything from other pickers: the channel is another one now, or was lost for long."""
        for who in list(self._peers):
            self._forget(who, now=now)

    def apply(self, data: bytes | memoryview, *, now: float, age_s: float = 0.0) -> Iterator[None]:
        """Apply a batch, a portion at each step. This picker's own are skipped. Raises MalformedError."""
        batch = batches.decode_batch(data)
        if batch.speaker == self._me:
            return
        peer = self._peers.get(batch.speaker)
        if peer is None:
            peer = self._peers[batch.speaker] = _Peer(heard_at=now - age_s, hello=batch.hello)
            self.start_fresh = True
        elif batch.number <= peer.number:
            return  # a sender that does not know whether a batch arrived sends it again
        elif batch.number != peer.number + 1:
            self._missed(peer, now=now)
        self._follow(peer, batch, now=now, age_s=age_s)
        books = age_s < self._timeout_s
        self._budget = _BATCH_CHUNKS
        try:
            events: Iterable[Event | int] = chained(batch.events, batch.proved or ())
            peer.reports = batch.proved is not None
            for event in events:
                if self._apply(peer, batch.newest, event, made_at=now - age_s, now=now, books=books):
                    yield
                    if self._peers.get(batch.speaker) is not peer:
                        return  # the peer was forgotten meanwhile
        except (MalformedBatchError, GeneratorExit):
            self._missed(peer, now=now)  # the rest of the batch, and perhaps more, is missing
            raise
        if books:
            self._failures(peer, batch, now=now)

    def load(self, data: bytes | memoryview, *, now: float, age_s: float) -> Iterator[None]:
        """Apply a stored table, a portion at each step. Raises MalformedError."""
        reader = _Peer(heard_at=now)
        for portion in batches.decode_table(data):
            batch = batches.decode_batch(portion)
            if batch.flags & BatchFlag.FRESH:
                reader.dictionary = ListenerDictionary()
            reader.dictionary.add_names(batch.names)
            self._budget = _BATCH_CHUNKS
            for event in batch.events:
                if isinstance(event, batches.HeldChain | batches.Charged | batches.Sized) and self._apply(
                    reader, 0, event, made_at=now - age_s, now=now, books=False
                ):
                    yield
            yield

    def expire(self, *, now: float) -> None:
        """Forget silent pickers. Compare the servers' counters with those in the loaded table."""
        for who in [w for w, peer in self._peers.items() if now - peer.heard_at > self._timeout_s]:
            self._forget(who, now=now)
        for name, floor in list(self._floors.items()):
            state = self._picker.fleet.get(name)
            computed = state.metrics.prompt_tokens if state is not None and state.metrics else None
            if state is None or computed is not None:
                del self._floors[name]
            if computed is not None and computed < floor:
                clear_endpoint(self._picker.table, name)

    # -- parts -----------------------------------------------------------------------------------------------

    def _missed(self, peer: _Peer, *, now: float) -> None:
        """Release all requests of the peer, because batches are missing, perhaps with ends of requests."""
        self.counts.gaps += 1
        peer.synced = peer.asked = False
        self._release_all(peer, now=now)

    def _follow(self, peer: _Peer, batch: batches.Batch, *, now: float, age_s: float) -> None:
        self.counts.batches += 1
        peer.number = batch.number
        peer.heard_at = max(peer.heard_at, now - age_s)
        if batch.flags & BatchFlag.FRESH:
            peer.dictionary, peer.synced, peer.asked = ListenerDictionary(), True, False
        elif not peer.synced and not peer.asked:
            peer.asked = True
            self.hello += 1
        if batch.flags & BatchFlag.FORGET:
            self._release_all(peer, now=now)
        if batch.hello != peer.hello:
            peer.hello = batch.hello
            self.start_fresh = True
        self.joining |= bool(batch.flags & BatchFlag.JOINING)
        if batch.flags & BatchFlag.STORED:
            self.stored_at = max(self.stored_at, now - age_s)
        peer.dictionary.add_names(batch.names)
        if self._gate is not None and age_s < self._timeout_s:
            rows = [(row[0], Row(row[1], row[2], *row[4:])) for row in batch.flow]
            fresh = bool(batch.flags & BatchFlag.FRESH)
            if rows or fresh:
                self._gate.take_reports(batch.speaker, rows, anew=fresh, now=now)

    def _forget(self, who: bytes, *, now: float) -> None:
        self._release_all(self._peers.pop(who), now=now)
        if self._gate is not None:
            self._gate.forget(who)

    def _apply(
        self, peer: _Peer, newest: int, event: Event | int, *, made_at: float, now: float, books: bool
    ) -> bool:
        """books: whether requests of this picker still count as load. True: the portion is full.
        A number as the event says that the prompt of this request is computed.
        """
        self._spent += _EVENT_CHUNKS
        self._apply_one(peer, newest, event, made_at=made_at, now=now, books=books)
        if self._spent < _PORTION_CHUNKS:
            return False
        self._budget -= self._spent
        self._spent = 0
        return True

    def _apply_one(
        self, peer: _Peer, newest: int, event: Event | int, *, made_at: float, now: float, books: bool
    ) -> None:
        if isinstance(event, int):
            self._proved(peer, newest - event, now=now)
            return
        if isinstance(event, batches.SharedOver):
            self._over(peer, newest - event.ago, event, at=made_at - event.age_ms / 1000, now=now)
            return
        state = self._server(peer, event.endpoint)
        if state is None:
            return
        if isinstance(event, batches.SharedBegan):
            at = made_at - event.age_ms / 1000
            self._began(peer, newest - event.ago, event, state, at=at, now=now, books=books)
        elif isinstance(event, batches.HeldChain):
            self._held(state, self._chain(peer, event), at=made_at - event.age_ms / 1000, now=now)
        elif isinstance(event, batches.Charged):
            charge(self._picker.table, state.endpoint.name, size_bytes=event.size_bytes, now=now)
        elif isinstance(event, batches.SharedRestarted):
            self._restarted(state, at=made_at - event.age_ms / 1000)
        else:
            self._sized(state, event)

    def _failures(self, peer: _Peer, batch: batches.Batch, *, now: float) -> None:
        for index in batch.hanging:
            if (state := self._server(peer, index)) is not None:
                self._picker.fleet.failures.hangs(state, now=now)
        for index in batch.cut:
            if (state := self._server(peer, index)) is not None:
                self._picker.on_cut(state, now=now)
        for id_hash, index in batch.made:
            if (state := self._server(peer, index)) is not None:
                self._picker.kept_state.remember(id_hash, state.endpoint.name, now=now)
        for body_hash, strikes in batch.fatal:
            self._picker.fatal.strike(body_hash, strikes, now=now)

    def _server(self, peer: _Peer, index: int) -> EndpointState | None:
        """Return the endpoint of an event. None: this picker does not know this process; this is counted."""
        known = peer.dictionary.name(index)
        if known is None:
            self.counts.unresolved += 1
            return None
        state = self._picker.fleet.get(EndpointName(known[0]))
        if state is None:
            self.counts.unknown_endpoints += 1
            return None
        if known[1] != identity_of(state):
            self.counts.stale += 1
            return None
        self.counts.events += 1
        return state

    def _began(
        self,
        peer: _Peer,
        number: int,
        event: batches.SharedBegan,
        state: EndpointState,
        *,
        at: float,
        now: float,
        books: bool,
    ) -> None:
        chain = self._chain(peer, event)
        before = peer.open.pop(number, None)
        if before is not None:
            # The data plane tried another server.
            self._close(before, kept=Kept.LOST, failed=True, at=at, now=now)
        if len(peer.open) >= _MOST_OPEN:
            return
        adapter = peer.dictionary.name(event.adapter - 1) if event.adapter else None
        if at < state.cold_at:
            self.counts.stale += bool(chain)
            chain, adapter = [], None
        booking = Booking(tokens=event.tokens, booked_at=at)
        guess = self._picker.guesses.guess(
            state, chain, booking=booking, adapter=adapter[0] if adapter is not None else ""
        )
        if books:
            bookings.book(state, booking, at=at, now=now)
            self._picker.fleet.unreported.reported(state.model, age_s=now - at, now=now)
        peer.open[number] = _OpenPick(state, booking, guess, booked=books, reports=peer.reports)

    def _chain(self, peer: _Peer, event: batches.SharedBegan | batches.HeldChain) -> list[ChunkHash]:
        """Return the chain of an event. Empty: its head is unknown, or the batch has named too many
        chunks.
        """
        if self._budget <= 0:
            self.counts.excessive += 1
            return []
        chain = peer.dictionary.chain(event.head, event.tail)
        if chain is None:
            self.counts.unresolved += 1
            return []
        self._spent += len(chain)
        return cast("list[ChunkHash]", chain)

    def _held(self, state: EndpointState, chain: list[ChunkHash], *, at: float, now: float) -> None:
        if at < state.cold_at:
            self.counts.stale += bool(chain)
        elif chain:
            self._picker.table.record(state.endpoint.name, chain, now=now)

    def _proved(self, peer: _Peer, number: int, *, now: float) -> None:
        request = peer.open.get(number)
        if request is not None:
            self.counts.events += 1
            self._spent += len(request.guess.chain)
            self._picker.guesses.prove(request.guess, now=now)

    def _over(self, peer: _Peer, number: int, event: batches.SharedOver, *, at: float, now: float) -> None:
        request = peer.open.pop(number, None)
        if request is not None:  # otherwise it began before this picker listened
            self.counts.events += 1
            self._close(request, kept=event.kept, failed=event.failed, at=at, now=now)

    def _close(self, request: _OpenPick, *, kept: int, failed: bool, at: float, now: float) -> None:
        """Release the booking, and settle the guess."""
        state, guesses = request.state, self._picker.guesses
        if request.booked and kept == Kept.DETACHED:
            bookings.detach(state)
        elif request.booked:
            bookings.release(state, request.booking, computed=kept == Kept.COMPUTED, at=at, now=now)
        same_server = self._picker.fleet.get(state.endpoint.name) is state and (
            state.process == request.guess.process
        )
        if same_server and (failed or kept == Kept.COMPUTED):
            self._picker.on_peer_answer(state, failed=failed, now=now)
        if request.guess.proven:
            guesses.used(request.guess, now=now)
        elif kept == Kept.LOST or (kept == Kept.DETACHED and request.reports):
            guesses.drop(request.guess)
        else:
            guesses.prove(request.guess, now=now)

    def _release_all(self, peer: _Peer, *, now: float) -> None:
        """Release all requests of a peer, whatever became of them."""
        for request in peer.open.values():
            if request.booked:
                bookings.release(request.state, request.booking, computed=False, at=now, now=now)
            self._picker.guesses.drop(request.guess)
        peer.open.clear()

    def _restarted(self, state: EndpointState, *, at: float) -> None:
        """Forget the cache of an endpoint, since another picker saw its counters go back."""
        if at > state.cold_at + _SAME_RESTART_S:
            state.restarted(at=at)
            clear_endpoint(self._picker.table, state.endpoint.name)

    def _sized(self, state: EndpointState, event: batches.Sized) -> None:
        """Set the size of the mirror until the endpoint itself states its size."""
        name = state.endpoint.name
        if state.metrics is None:
            resize(self._picker.table, name, capacity_bytes=event.capacity_bytes)
            if event.prompt_tokens is not None:
                self._floors[name] = event.prompt_tokens

    def check_integrity(self) -> None:
        held: dict[int, int] = {}
        for peer in self._peers.values():
            for request in [request for request in peer.open.values() if request.booked]:
                held[id(request.state)] = held.get(id(request.state), 0) + 1
        for state in self._picker.fleet.states():
            assert state.peers_in_flight >= held.get(id(state), 0)
