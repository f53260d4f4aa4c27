"""Applies the events of other pickers to this picker's table and loads.

Owns the open requests of every other picker. Invariants: an open request of another picker holds exactly one
booking here. The booking is released when the request ends, when one of the other picker's batches is missing
(the end may have been in it), or when the picker was silent for the timeout. An event from before an endpoint
lost its cache never enters the table.

Events of other pickers come late, so the last scrape of a server may have counted a request already. Bookings
therefore compare the time of the event with the time of the scrape.

A long chain costs CPU. So batches are applied event by event, and the caller may serve requests between two
events.

Pure: `now` is the caller's monotonic time, and `age_s` is how long a batch was on its way.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, cast

from epp.base.types import ChunkHash, EndpointName, unpack_hashes
from epp.picker.endpoints.backlog import Booking
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.marks import Form
from epp.picker.events import Guess
from epp.picker.picker import Picker
from epp.picker.prefix_index.upkeep import clear_endpoint
from epp.sources.sharing import batches
from epp.sources.sharing.batches import Kept, ServerEvent, SharedBegan, SharedEvent, SharedOver
from epp.sources.sharing_status import SharingStatus

_MOST_OPEN: Final = 100_000
"""Most open requests of all other pickers, some 1 KB each: a thousand servers run 64,000. Further ones are
ignored, with their load and their prefixes."""
_AT_ONCE: Final = 64
"""Open requests that are released in a step. One takes up to 20 us."""
_HASH_BYTES: Final = 8
_GRACE_S: Final = 2.0
"""A peer is not forgotten within this time after a batch has come. It is twice the pause between signs of
life."""
_SAME_RESTART_S: Final = 5.0
"""Pickers scrape at different moments. So a restart that another picker reports within this time of our own
observation is the same restart."""


@dataclass(slots=True, eq=False)
class _OpenPick:
    """An open request of another picker."""

    guess: Guess
    booked: bool
    """Whether it counts as load here."""


@dataclass(slots=True, eq=False)
class _Sender:
    heard_at: float
    number: int
    """Of its last batch."""
    cut: bool = False
    """Whether the rest of its last batch was not applied."""
    open: dict[int, _OpenPick] = field(default_factory=dict)


class Listener:
    def __init__(self, picker: Picker, counts: SharingStatus, *, me: bytes, timeout_s: float) -> None:
        self._picker = picker
        self._counts = counts
        self._me = me
        self._timeout_s = timeout_s
        self._peers: dict[bytes, _Sender] = {}
        self._open = 0
        """The number of open requests of all peers."""

    @property
    def peers(self) -> int:
        return len(self._peers)

    def forget_all(self, *, now: float) -> bool:
        """Forget all other pickers: the channel is another one now. Return whether more steps may be due."""
        return self._forget_one_of(self._peers.items(), now=now)

    def apply(self, data: bytes | memoryview, *, now: float, age_s: float = 0.0) -> Iterator[None]:
        """Apply a batch, an event at each step. This picker's own are skipped. Raises MalformedBatchError."""
        batch = batches.decode_batch(data)
        if batch.speaker == self._me:
            return
        peer = self._peers.get(batch.speaker)
        if peer is None:
            peer = self._peers[batch.speaker] = _Sender(now - age_s, batch.number - 1)
        if batch.number <= peer.number:
            return  # a sender that does not know whether a batch arrived sends it again
        missed = peer.cut or batch.number != peer.number + 1
        peer.number, peer.cut = batch.number, True
        current = age_s < self._timeout_s
        # A late batch is a weak sign that its sender still lives, but the next one of a peer that is always
        # late must be in time. Old batches are read to their end.
        late_s = min(age_s, self._timeout_s - _GRACE_S) if current else 0.0
        peer.heard_at = max(peer.heard_at, now - late_s)
        self._counts.gaps += missed
        while missed and self._release_some(peer, now=now):
            yield
        for event in batch.events:
            if self._peers.get(batch.speaker) is not peer:
                return  # the peer was forgotten meanwhile
            at = now - age_s - max(0, batch.at_ms - event.at_ms) / 1000
            self._apply(peer, event, at=at, now=now, current=current)
            yield
        peer.cut = False

    def expire(self, *, now: float) -> bool:
        """Forget silent pickers. Return whether more steps may be due."""
        silent = (item for item in self._peers.items() if now - item[1].heard_at > self._timeout_s)
        return self._forget_one_of(silent, now=now)

    # -- parts -----------------------------------------------------------------------------------------------

    def _forget_one_of(self, peers: Iterable[tuple[bytes, _Sender]], *, now: float) -> bool:
        for who, peer in peers:
            if not self._release_some(peer, now=now):
                del self._peers[who]
            return True
        return False

    def _apply(self, peer: _Sender, event: SharedEvent, *, at: float, now: float, current: bool) -> None:
        """at: when the event happened, by our clock. current: whether requests of this picker still count as
        load.
        """
        match event:
            case batches.SharedProved(_, number):
                if (request := peer.open.get(number)) is not None:
                    self._counts.applied_events += 1
                    self._picker.guesses.prove(request.guess, now=now)
            case SharedOver():
                request = self._taken(peer, event.number)
                if request is not None:  # otherwise it began before this picker listened
                    self._counts.applied_events += 1
                    self._close(request, event, at=at, now=now, current=current)
            case batches.SharedFatal(_, body_hash, strikes):
                if current:
                    self._picker.fatal.strike(body_hash, strikes, now=now)
            case _:
                if type(event) is SharedBegan and (tried := self._taken(peer, event.number)) is not None:
                    # The data plane tried another server, which may be unknown here.
                    lost = SharedOver(event.at_ms, event.number, Kept.LOST, failed=True)
                    self._close(tried, lost, at=at, now=now, current=current)
                state = self._server(event.server, event.process)
                if state is not None:
                    self._apply_to(state, peer, event, at=at, now=now, current=current)

    def _apply_to(
        self, state: EndpointState, peer: _Sender, event: ServerEvent, *, at: float, now: float, current: bool
    ) -> None:
        failures = self._picker.fleet.failures
        match event:
            case SharedBegan():
                self._began(peer, event, state, at=at, now=now, books=current)
            case batches.HeldChain():
                self._hold(state, event, at=at, now=now)
            case batches.SharedTrouble(what="restarted") if at > state.cold_at + _SAME_RESTART_S:
                state.restarted(at=at)
                clear_endpoint(self._picker.caches.table, state.endpoint.name)
            case batches.SharedMade():
                self._picker.kept_state.remember(event.id_hash, state.endpoint, at=at)
            case batches.SharedTrouble(what="hangs") if current and not failures.refuted(state, now=now):
                failures.convict(state, now=now)
            case batches.SharedTrouble(what="cut") if current:
                failures.failed(state, Form.CUTS, now=now)

    def _server(self, name: str, process: int) -> EndpointState | None:
        """Return the endpoint of an event. None: this picker does not know this process; this is counted."""
        state = self._picker.fleet.get(EndpointName(name))
        if state is None:
            self._counts.skipped["stranger"] += 1
            return None
        if process != batches.identity_of(state):
            self._counts.skipped["stale"] += 1
            return None
        self._counts.applied_events += 1
        return state

    def _began(
        self, peer: _Sender, event: SharedBegan, state: EndpointState, *, at: float, now: float, books: bool
    ) -> None:
        chain, adapter = _chain(event.chain), event.adapter
        if self._open >= _MOST_OPEN:
            return
        if at < state.cold_at:
            self._counts.skipped["stale"] += bool(chain)
            chain, adapter = [], ""
        booking = Booking(tokens=event.tokens, booked_at=at)
        guess = self._picker.guesses.guess(state, chain, booking=booking, adapter=adapter)
        if books:
            state.book(booking, peers_at=at, now=now)
            self._picker.fleet.unreported.reported(state.model, age_s=now - at, now=now)
        peer.open[event.number] = _OpenPick(guess, booked=books)
        self._open += 1

    def _hold(self, state: EndpointState, held: batches.HeldChain, *, at: float, now: float) -> None:
        if at < state.cold_at:
            self._counts.skipped["stale"] += 1
            return
        guesses, booking = self._picker.guesses, Booking(tokens=0, booked_at=at)
        guess = guesses.guess(state, _chain(held.chain), booking=booking, adapter=held.adapter)
        guesses.prove(guess, now=now)

    def _close(self, request: _OpenPick, over: SharedOver, *, at: float, now: float, current: bool) -> None:
        """Release the booking, and settle the guess. current: whether the answer still says how the server is
        now; a picker that joins reads old batches too.
        """
        state, guesses, booking = request.guess.state, self._picker.guesses, request.guess.booking
        computed = over.kept == Kept.COMPUTED
        if request.booked and over.kept == Kept.DETACHED:
            state.detach(peers=True)
        elif request.booked:
            state.release(booking, computed=computed, peers_at=at, now=now)
        same_server = self._picker.fleet.get(state.endpoint.name) is state and (
            state.process == request.guess.process
        )
        if current and same_server and over.no_token:
            answers = self._picker.fleet.answers
            answers.no_token(state, sent_at=booking.booked_at, tokens=booking.tokens, now=now)
        if current and same_server and (over.failed or computed):
            self._picker.news.on_peer_answer(state, failed=over.failed, now=now)
        guesses.used(request.guess, now=now)
        guesses.drop(request.guess)  # if nothing has proved it

    def _taken(self, peer: _Sender, number: int) -> _OpenPick | None:
        request = peer.open.pop(number, None)
        self._open -= request is not None
        return request

    def _release_some(self, peer: _Sender, *, now: float) -> bool:
        """Release some requests of a peer, whatever became of them: the last first, which fewest wait for.
        Return whether more are open.
        """
        for _ in range(min(_AT_ONCE, len(peer.open))):
            _, request = peer.open.popitem()
            self._open -= 1
            if request.booked:
                request.guess.state.release(request.guess.booking, computed=False, peers_at=now, now=now)
            self._picker.guesses.drop(request.guess)
        return bool(peer.open)


def _chain(packed: bytes) -> list[ChunkHash]:
    try:
        return cast("list[ChunkHash]", unpack_hashes(packed[: batches.MOST_CHUNKS * _HASH_BYTES]))
    except ValueError as error:
        raise batches.MalformedBatchError(f"{len(packed)} bytes are not a list of hashes") from error
