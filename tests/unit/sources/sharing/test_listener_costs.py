"""The cost of a batch follows from the length of its chains and not from its bytes. So a batch is applied
in portions and has a budget.
"""

from __future__ import annotations

import contextlib
from array import array

import msgspec
import pytest

from epp.sources.sharing.batches import (
    MOST_EVENTS,
    Batch,
    BatchFlag,
    Event,
    HeldChain,
    MalformedBatchError,
    SharedBegan,
    encode,
    encode_table,
    pack_hashes,
)
from epp.sources.sharing.dictionary import MOST_CHUNKS
from epp.sources.sharing.speaker import identity_of
from tests.unit.sources.sharing.pickers import Replica

CHAIN = array("Q", range(1, MOST_CHUNKS + 1))
LAST = pack_hashes(CHAIN[-1:])
PORTION_CHUNKS = 4_096
BUDGET_CHUNKS = 2**18


def peer_batch(replica: Replica, number: int, events: list[Event]) -> bytes:
    """Return a batch of another picker about endpoint 0, which is a."""
    state = next(iter(replica.picker.fleet.states()))
    fresh = number == 1
    return encode(
        Batch(
            speaker=b"other",
            number=number,
            hello=0,
            flags=BatchFlag.FRESH if fresh else 0,
            newest=number * 1_000,
            names=[("a", identity_of(state))] if fresh else [],
            events=events,
        )
    )


def told_one_long_chain(replica: Replica) -> None:
    replica.exchange.receive(peer_batch(replica, 1, [HeldChain(0, 0, b"", pack_hashes(CHAIN))]), now=1.0)


def test_a_small_batch_of_long_chains_is_applied_in_portions() -> None:
    replica = Replica(1)
    told_one_long_chain(replica)
    small = peer_batch(replica, 2, [HeldChain(0, 0, LAST, b"")] * 60)
    assert len(small) < 1_000
    steps = 0
    for _ in replica.exchange.listener.apply(small, now=1.1, age_s=0.0):
        steps += 1
        replica.check()
    whole = BUDGET_CHUNKS // MOST_CHUNKS
    assert whole - 1 <= steps <= whole + 1, "each of these chains is a portion of its own"
    assert replica.exchange.listener.counts.excessive == 60 - steps
    assert not replica.exchange.listener.counts.unresolved


def test_many_small_events_are_also_applied_in_portions() -> None:
    replica = Replica(1)
    told_one_long_chain(replica)
    small = peer_batch(replica, 2, [SharedBegan(n, 0, 0, 10, 0, b"", b"\1" * 8) for n in range(MOST_EVENTS)])
    steps = sum(1 for _ in replica.exchange.listener.apply(small, now=1.1, age_s=0.0))
    assert steps >= MOST_EVENTS * 16 // PORTION_CHUNKS
    replica.check()


@pytest.mark.parametrize("how", ["given up", "forgotten"])
def test_a_batch_that_is_applied_only_partly_leaves_no_bookings(how: str) -> None:
    replica = Replica(1)
    told_one_long_chain(replica)
    began: list[Event] = [SharedBegan(n, 0, 0, 10, 0, LAST, b"") for n in range(8)]
    hearing = replica.exchange.listener.apply(peer_batch(replica, 2, began), now=1.1, age_s=0.0)
    next(hearing)
    assert replica.in_flight_of_peers() == {"a": 1}
    if how == "given up":
        assert hasattr(hearing, "close")
        hearing.close()
    else:
        replica.exchange.leave(now=1.2)
        with contextlib.suppress(StopIteration):
            next(hearing)
    assert replica.in_flight_of_peers() == {}
    replica.check()


def test_longer_chains_are_known_by_their_beginning() -> None:
    replica = Replica(1)
    long = array("Q", range(1, 3 * MOST_CHUNKS))
    replica.exchange.receive(peer_batch(replica, 1, [HeldChain(0, 0, b"", pack_hashes(long))]), now=1.0)
    replica.exchange.receive(peer_batch(replica, 2, [HeldChain(0, 0, LAST, pack_hashes(long))]), now=1.0)
    name = next(iter(replica.picker.fleet.states())).endpoint.name
    assert replica.picker.table.mirrors[name].entries == MOST_CHUNKS
    replica.check()


def test_batch_with_too_many_events_is_refused_before_any_event_is_created() -> None:
    replica = Replica(1)
    with pytest.raises(MalformedBatchError):
        replica.exchange.receive(
            peer_batch(replica, 1, [HeldChain(0, 0, b"", b"")] * (MOST_EVENTS + 1)), now=1.0
        )
    assert replica.exchange.listener.peers == 0


def test_a_stored_table_is_loaded_in_portions_however_it_was_cut() -> None:
    replica = Replica(1)
    first = msgspec.structs.replace(
        msgspec.msgpack.decode(
            peer_batch(replica, 1, [HeldChain(0, 0, b"", pack_hashes(CHAIN))]), type=Batch
        ),
        speaker=b"",
    )
    again = msgspec.structs.replace(first, flags=0, names=[], events=[HeldChain(0, 0, LAST, b"")] * 30)
    table = encode_table([encode(first), encode(again)])
    assert (
        sum(1 for _ in replica.exchange.listener.load(table, now=1.0, age_s=0.0))
        >= BUDGET_CHUNKS // MOST_CHUNKS
    )
    replica.check()
