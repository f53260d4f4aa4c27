"""When nodes are reordered in the background, and which nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from model_server.tiers.errors import DamagedSegmentError
from model_server.tiers.events import TierEvent, TierRemoved, TierStored
from model_server.tiers.health import FIRST_PAUSE_S
from model_server.tiers.learnt import Learnt
from model_server.tiers.node_reports import NodeReports
from model_server.tiers.reordering import BackgroundReordering
from model_server.tiers.store import PrefixStore
from tests.unit.model_server.tiers.stored_prefixes import CAPACITY, LAYOUT, chain, records


class Simulated:
    """Time passes only by waiting and by reordering, which takes a second for each node."""

    def __init__(self, *, busy_share: float, is_idle: Callable[[float], bool], until_s: float) -> None:
        self.now = 0.0
        self.until_s = until_s
        self.done_at: list[float] = []
        self.due = 1_000_000
        self.fails: BaseException | None = None
        self.reordering = BackgroundReordering(
            self.reorder_next,
            is_idle=lambda: is_idle(self.now),
            busy_share=busy_share,
            clock=lambda: self.now,
            stop_within=self.stop_within,
        )

    def reorder_next(self) -> bool:
        if not self.due:
            return False
        self.now += 1
        if self.fails is not None:
            raise self.fails
        self.due -= 1
        self.done_at.append(self.now)
        return True

    def stop_within(self, wait_s: float) -> bool:
        assert wait_s >= 0
        self.now += wait_s
        return self.now >= self.until_s


def test_while_the_engine_computes_reordering_takes_only_its_share_of_time() -> None:
    simulated = Simulated(busy_share=0.1, is_idle=lambda _: False, until_s=1000)
    simulated.reordering.run()
    assert 95 <= simulated.reordering.reordered_nodes <= 100


def test_an_idle_engine_reorders_node_after_node_without_a_pause() -> None:
    simulated = Simulated(busy_share=0.01, is_idle=lambda now: now >= 50, until_s=60)
    simulated.reordering.run()
    early = [at for at in simulated.done_at if at < 50]
    assert len(early) == 1
    assert 9 <= len(simulated.done_at) - len(early) <= 11


def test_if_no_node_is_due_reordering_looks_again_from_time_to_time() -> None:
    simulated = Simulated(busy_share=0.5, is_idle=lambda _: True, until_s=100)
    simulated.due = 3
    simulated.reordering.run()
    assert simulated.reordering.reordered_nodes == 3
    assert simulated.now >= 100


@pytest.mark.parametrize(
    "error", [OSError("no space"), DamagedSegmentError("altered"), RuntimeError("what nobody thought of")]
)
def test_after_any_failure_the_disk_is_not_used_for_a_while(error: Exception) -> None:
    simulated = Simulated(busy_share=1.0, is_idle=lambda _: True, until_s=3 * FIRST_PAUSE_S)
    simulated.fails = error
    simulated.reordering.run()
    assert simulated.reordering.failures == 2
    assert simulated.reordering.reordered_nodes == 0


def test_the_thread_ends_when_it_is_stopped() -> None:
    reordering = BackgroundReordering(lambda: False, is_idle=lambda: False, busy_share=0.5, clock=lambda: 0.0)
    reordering.start()
    assert reordering.stop(timeout_s=60)


def test_a_share_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="over 0"):
        BackgroundReordering(lambda: False, is_idle=lambda: True, busy_share=0, clock=lambda: 0.0)


BLOCKS = tuple(chain(range(16)))


def weights(num_blocks: int, *, start: int = 0) -> list[list[float]]:
    """Later tokens are more important."""
    tokens = range(start * LAYOUT.block_tokens, (start + num_blocks) * LAYOUT.block_tokens)
    return [[float(layer + token) for token in tokens] for layer in range(2)]


def fresh() -> Learnt:
    return Learnt(num_layers=2, block_tokens=LAYOUT.block_tokens)


def test_a_node_is_due_after_two_requests_and_at_each_doubling() -> None:
    learnt, due_after = fresh(), []
    for request in range(1, 20):
        learnt.record(BLOCKS, weights(4))
        learnt.check_integrity()
        if (name := learnt.next_due()) is not None:
            assert name == BLOCKS[0]
            assert learnt.orders(BLOCKS) is not None
            due_after.append(request)
        assert learnt.next_due() is None, "a node is due once"
    assert due_after == [2, 4, 8, 16]


def test_parts_of_split_node_keep_their_means_and_longer_node_starts_again() -> None:
    learnt = fresh()
    learnt.record(BLOCKS, weights(4))
    head = learnt.known(BLOCKS[:1])
    tail = learnt.known(BLOCKS[1:])
    assert head is not None
    assert tail is not None
    assert list(head.means(1)) == weights(1)[1]
    assert list(tail.means(1)) == weights(3, start=1)[1]
    learnt.check_integrity()
    assert learnt.known(BLOCKS) is None
    learnt.record(BLOCKS, weights(4))
    learnt.check_integrity()
    again = learnt.known(BLOCKS)
    assert again is not None
    assert again.num_requests == 1
    orders = learnt.orders(BLOCKS)
    assert orders is not None
    assert orders[0].stored() == list(reversed(range(16)))


def test_requests_that_use_the_beginning_of_a_node_count_for_its_beginning() -> None:
    learnt = fresh()
    learnt.record(BLOCKS, weights(4))
    learnt.record(BLOCKS, [[layer + 2.0 for layer in own] for own in weights(2)])
    learnt.check_integrity()
    importance = learnt.known(BLOCKS)
    assert importance is not None
    assert list(importance.means(0)) == [*(token + 1.0 for token in range(8)), *weights(4)[0][8:]]
    assert importance.num_requests == 2
    assert learnt.next_due() == BLOCKS[0]
    tail = importance.split(8)[1]
    assert tail.num_requests == 1
    with pytest.raises(ValueError, match="2 layers and at most 16 tokens"):
        importance.record(weights(5))


def test_the_importance_of_removed_nodes_is_forgotten() -> None:
    learnt = fresh()
    for _ in range(2):
        learnt.record(BLOCKS[:1], weights(1))
        learnt.record(BLOCKS[1:], weights(3))
    learnt.orders(BLOCKS[1:])
    learnt.keep([BLOCKS[0]])
    learnt.check_integrity()
    assert learnt.known(BLOCKS[1:]) is None
    assert learnt.orders(BLOCKS[1:]) is None
    assert learnt.next_due() == BLOCKS[0]
    assert learnt.next_due() is None


def test_a_node_is_reported_when_it_is_whole_and_when_it_breaks(
    tmp_path: Path,
) -> None:
    store = PrefixStore(tmp_path, LAYOUT, capacity_bytes=CAPACITY)
    store.put(BLOCKS, records(BLOCKS))
    [segment] = store.segments()
    told: list[TierEvent] = []
    reports = NodeReports(LAYOUT)
    reports.tell = told.append
    chunks = LAYOUT.num_layers * (1 + LAYOUT.num_chunks(16))
    for count in range(chunks):
        assert not told
        reports.add(segment)
        reports.check_integrity([segment] * (count + 1))
    stored, removed = TierStored("CPU", BLOCKS, 0, None), TierRemoved("CPU", BLOCKS)
    assert told == [stored]
    reports.tell_all()
    reports.remove(segment)
    reports.remove(segment)
    assert told == [stored, stored, removed]
    reports.tell_all()
    reports.add(segment)
    reports.add(segment)
    assert told == [stored, stored, removed, stored]
    for _ in range(chunks):
        reports.remove(segment)
    reports.check_integrity([])
    store.close()
