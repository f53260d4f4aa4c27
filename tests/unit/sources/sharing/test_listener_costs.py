"""A batch is applied event by event, and costs no more than its bytes."""

import contextlib
from functools import partial

import pytest

from epp.base.types import pack_hashes
from epp.sources.sharing import batches
from epp.sources.sharing.batches import SharedBegan, SharedEvent, identity_of
from tests.harness.steps import steps
from tests.unit.sources.sharing.pickers import Replica

LONG = pack_hashes(range(1, batches.MOST_CHUNKS + 1))


def began(replica: Replica, number: int, chain: bytes) -> SharedBegan:
    return SharedBegan(0, "a", identity_of(next(iter(replica.picker.fleet.states()))), number, 10, "", chain)


def peer_batch(events: list[SharedEvent]) -> bytes:
    return batches.encode(batches.Batch(b"other", 1, 0, events))


@pytest.mark.parametrize("how", ["given up", "forgotten"])
def test_a_batch_that_is_applied_only_partly_leaves_no_bookings(how: str) -> None:
    replica = Replica(1)
    data = peer_batch([began(replica, n, LONG) for n in range(8)])
    hearing = replica.exchange.listener.apply(data, now=1.1)
    next(hearing)
    assert replica.in_flight_of_peers() == {"a": 1}
    if how == "given up":
        assert hasattr(hearing, "close")
        hearing.close()
        assert replica.in_flight_of_peers() == {"a": 1}, "the next batch releases it, in steps"
        replica.receive([batches.encode(batches.Batch(b"other", 2, 0, []))], now=1.2)
    else:
        replica.exchange.listener.forget_all(now=1.2)
        with contextlib.suppress(StopIteration):
            next(hearing)
    assert replica.in_flight_of_peers() == {}
    replica.check()


@pytest.mark.parametrize("how", ["forgotten", "a batch is missing"])
def test_the_requests_of_other_pickers_are_released_in_steps_of_equal_cost(how: str) -> None:
    costs = []
    for count in (100, 400):
        replica = Replica(1)
        replica.receive([peer_batch([began(replica, n, b"") for n in range(count)])], now=1.1)
        forget = partial(replica.exchange.listener.forget_all, now=1.2)
        gap = replica.exchange.listener.apply(batches.encode(batches.Batch(b"other", 3, 0, [])), now=1.2)
        step = forget if how == "forgotten" else partial(next, gap, None)
        costs.append([steps(step) for _ in range(1 + count // 64)])
        assert replica.in_flight_of_peers() == {}
    assert max(costs[1]) < 1.2 * max(costs[0])


def test_longer_chains_are_known_by_their_beginning() -> None:
    replica = Replica(1)
    state = next(iter(replica.picker.fleet.states()))
    chain = pack_hashes(range(1, 3 * batches.MOST_CHUNKS))
    replica.receive([peer_batch([batches.HeldChain(0, "a", identity_of(state), chain)])], now=1.0)
    assert replica.picker.caches.table.mirrors[state.endpoint.name].entries == batches.MOST_CHUNKS


@pytest.mark.parametrize("what", ["events", "bytes"])
def test_a_batch_over_a_bound_is_refused_before_any_event_is_made(what: str) -> None:
    replica = Replica(1)
    one = began(replica, 1, b"" if what == "events" else LONG)
    number = batches.MOST_EVENTS + 1 if what == "events" else batches.MOST_BATCH_BYTES // len(LONG) + 1
    with pytest.raises(batches.MalformedBatchError):
        replica.receive([peer_batch([one] * number)], now=1.0)
    assert replica.exchange.listener.peers == 0
