"""One picker's side of sharing: makes the batches to send. Its `listener` applies received batches. Pure.

Events enter a bounded queue as they happen, and are cut into batches. Nothing waits here. When the link is
slow or away, the queue grows to its limit. From then on the oldest events are dropped and counted. The next
batch then leaves out a number. So the others release all requests that were announced before, because the
events of their ends may be among the dropped ones.

Callers: `epp.sources.sharing.service`, over Redis or a local socket, and the simulator, with a delay.

Invariants: `waiting_bytes` is the sum of the sizes of the events in the queue. A request has a number from
its first event until its last.
"""

from collections import deque
from typing import Final

from epp.base.types import pack_hashes
from epp.picker import events
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.events import Cut, Hangs, Phase, Pick, PickerEvent, PrefillJob, Restarted
from epp.picker.picker import Picker
from epp.sources.sharing import batches
from epp.sources.sharing.batches import Kept, SharedEvent, milliseconds
from epp.sources.sharing.listener import Listener
from epp.sources.sharing_status import SharingStatus

LIFE_SIGN_S: Final = 1.0
"""A picker with nothing to send sends a sign of life this often."""
OUTBOX_BYTES: Final = 16 * 2**20
"""Events that wait while Redis is slow or away. Beyond this the oldest events are dropped and counted."""
PEER_TIMEOUT_S: Final = 5.0
"""A picker that has sent nothing for this long is considered dead. Its requests in flight no longer count."""
_EVENT_BYTES: Final = 100
"""Assumed memory of an event besides its chain and the name of its adapter."""
_MOST_CHAR_BYTES: Final = 4
_BATCH_BYTES: Final = 256 * 1024
_PREFILL_KEPT: Final = {"computed": Kept.COMPUTED, "lost": Kept.LOST, "detached": Kept.DETACHED}
_TROUBLE: Final[dict[type, batches.Trouble]] = {Restarted: "restarted", Hangs: "hangs", Cut: "cut"}


class Exchange:
    """Connects one picker with its peers. `me` is a random id, a new one after each start."""

    def __init__(self, picker: Picker, *, me: bytes, outbox_bytes: int = OUTBOX_BYTES) -> None:
        self.picker = picker
        self.counts = SharingStatus()
        self.listener = Listener(picker, self.counts, me=me, timeout_s=PEER_TIMEOUT_S)
        self._me = me
        self._limit_bytes = outbox_bytes
        self._events: deque[tuple[SharedEvent, int]] = deque()
        """Each with its size in bytes."""
        self.waiting_bytes = 0
        self._table = picker.caches.table
        self._numbers: dict[Pick | PrefillJob, int] = {}
        """The work of a prefill server for a request has its own number: to other pickers it is a request to
        that server."""
        self._newest = 0
        self._batches = 0
        self._sign_at = float("-inf")
        picker.subscribe(self.on_event)

    def channel(self, pool: str) -> str:
        """Return the channel of pickers that may share: same pool, same hashes, same format. It changes with
        the policy's chunks and with the hash secret. It is in braces, so that a cluster of Redis keeps all
        keys of a channel on one node.
        """
        return f"prefix-gateway:{{{pool}:{batches.FORMAT}:{self.picker.caches.roots.fingerprint}}}"

    def next_batch(self, *, now: float) -> bytes | None:
        """Return the next batch, with as many events as fit. Without events it is a sign of life. None: there
        is nothing to send, and no sign of life is due.
        """
        if self._table is not self.picker.caches.table:
            # Prompts are cut or hashed differently now, so nobody would understand the chains that wait here.
            self._events.clear()
            self._table, self.waiting_bytes = self.picker.caches.table, 0
        if now - self._sign_at >= LIFE_SIGN_S:
            self._sign_at = now
        elif not self._events:
            return None
        taken: list[SharedEvent] = []
        taken_bytes = 0
        while self._events and taken_bytes < _BATCH_BYTES:
            event, size_bytes = self._events.popleft()
            taken.append(event)
            taken_bytes += size_bytes
        self.waiting_bytes -= taken_bytes
        self.counts.sent_events += len(taken)
        self._batches += 1
        return batches.encode(batches.Batch(self._me, self._batches, milliseconds(now), taken))

    def on_event(self, event: PickerEvent) -> None:
        """Queue what others need to know. `Ended` says how an answer ended, so `Answered` is not sent."""
        match event:
            case events.Began(at, work) | events.PrefillBegan(at, work):
                self._newest += 1
                self._numbers[work] = self._newest
                self._add_began(work, at=at)
            case events.Moved(at, work):
                self._add_began(work, at=at)
            case events.Proved(at, work, held):
                self._add_proof(work, at=at, holds=held is not None)
            case events.Ended(at, work):
                self._add_end(work, at=at, kept=_kept(work), failed=work.failed, no_token=work.no_token)
            case events.PrefillEnded(at, work, outcome, failed):
                self._add_end(work, at=at, kept=_PREFILL_KEPT[outcome], failed=failed)
            case Restarted(at, server) | Hangs(at, server) | Cut(at, server):
                self._add(batches.SharedTrouble(*_server(server, at=at), _TROUBLE[type(event)]))
            case events.MadeState(at, server, id_hash):
                self._add(batches.SharedMade(*_server(server, at=at), id_hash))
            case events.Fatal(at, body_hash, strikes):
                self._add(batches.SharedFatal(milliseconds(at), body_hash, strikes))

    def _add_began(self, work: Pick | PrefillJob, *, at: float) -> None:
        number, guess, packed = self._numbers.get(work, 0), work.guess, _packed(work)
        tokens = min(work.guess.booking.tokens, batches.MOST_TOKENS)
        server = _server(work.state, at=at)
        more_bytes = len(packed) + _MOST_CHAR_BYTES * len(guess.adapter)
        self._add(batches.SharedBegan(*server, number, tokens, guess.adapter, packed), more_bytes)

    def _add_proof(self, work: Pick | PrefillJob, *, at: float, holds: bool) -> None:
        number, adapter = self._numbers.get(work), work.guess.adapter
        if number is not None:
            self._add(batches.SharedProved(milliseconds(at), number))
        elif (packed := _packed(work) if holds else b"") or adapter:  # others have forgotten this request
            held = batches.HeldChain(*_server(work.state, at=at), packed, adapter)
            self._add(held, len(packed) + _MOST_CHAR_BYTES * len(adapter))

    def _add_end(
        self, work: Pick | PrefillJob, *, at: float, kept: Kept, failed: bool, no_token: bool = False
    ) -> None:
        number = self._numbers.pop(work, 0)
        self._add(batches.SharedOver(milliseconds(at), number, int(kept), failed, no_token))

    def _add(self, event: SharedEvent, more_bytes: int = 0) -> None:
        size_bytes = _EVENT_BYTES + more_bytes
        self._events.append((event, size_bytes))
        self.waiting_bytes += size_bytes
        if self.waiting_bytes > self._limit_bytes:
            self._batches += 1
        while self.waiting_bytes > self._limit_bytes:
            self.waiting_bytes -= self._events.popleft()[1]
            self.counts.dropped_events += 1


def _server(state: EndpointState, *, at: float) -> tuple[int, str, int]:
    return milliseconds(at), state.endpoint.name, batches.identity_of(state)


def _packed(work: Pick | PrefillJob) -> bytes:
    return pack_hashes(work.guess.chain[: batches.MOST_CHUNKS])


def _kept(pick: Pick) -> Kept:
    if pick.phase is Phase.DETACHED:
        return Kept.DETACHED
    return Kept.COMPUTED if pick.guess.proven and pick.computed else Kept.LOST
