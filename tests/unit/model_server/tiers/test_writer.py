"""Prefixes are written in the background, and no caller waits."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from model_server.core.hashing import BlockHash
from model_server.tiers.health import FIRST_PAUSE_S, LONGEST_PAUSE_S, Health
from model_server.tiers.segment import LayerRecords
from model_server.tiers.store import PrefixStore
from model_server.tiers.writer import NODE_TOKENS, BackgroundWriter, PendingBlocks
from tests.harness.clock import Clock
from tests.unit.model_server.tiers.stored_prefixes import CAPACITY, LAYOUT, chain, check_segment, records


class Writing:
    """A store, its writer, and prefixes whose records the writer gets only while `gate` is open."""

    def __init__(self, folder: Path, *, capacity_bytes: int = CAPACITY, waiting_bytes: int = 10_000) -> None:
        self.clock = Clock()
        self.store = PrefixStore(folder, LAYOUT, capacity_bytes=capacity_bytes)
        self.writer = BackgroundWriter(self.store, capacity_bytes=waiting_bytes, clock=self.clock)
        self.gate = threading.Event()
        self.gate.set()
        self.at_the_gate = threading.Event()

    def offer(self, hashes: Sequence[BlockHash], *, first: int = 0, size_bytes: int = 1000) -> bool:
        def made(start: int, end: int) -> Sequence[LayerRecords]:
            self.at_the_gate.set()
            assert self.gate.wait(timeout=60)
            return records(hashes[start:end])

        return self.writer.offer(PendingBlocks(hashes, first, size_bytes, made))

    @property
    def stored(self) -> list[tuple[int, int]]:
        """Return the first token of each node, and its number of tokens."""
        places = sorted((s.place.first_block, len(s.place.hashes)) for s in self.store.segments())
        return [(LAYOUT.block_tokens * first, LAYOUT.block_tokens * count) for first, count in places]

    def drain(self) -> None:
        assert self.writer.drain(timeout_s=60)
        self.writer.check_integrity()
        self.store.check_integrity()
        for segment in self.store.segments():
            check_segment(segment)


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    made = Writing(tmp_path)
    yield made
    made.gate.set()
    assert made.writer.close(timeout_s=60)
    made.store.close()


def test_offered_blocks_are_stored_below_earlier_blocks(writing: Writing) -> None:
    hashes = chain(range(32))
    assert writing.offer(hashes[:3])
    assert writing.offer(hashes, first=3)
    writing.drain()
    assert writing.store.num_held(hashes) == 8
    assert len(writing.store.segments()) == 2
    assert writing.stored == [(0, 12), (12, 20)]
    assert writing.writer.counts.stored_blocks == 8
    assert writing.writer.counts.written_bytes == LAYOUT.data_bytes(32)


def test_blocks_whose_beginning_was_removed_are_not_stored(writing: Writing) -> None:
    hashes = chain(range(32))
    assert writing.offer(hashes, first=3)
    writing.drain()
    assert writing.store.num_held(hashes) == 0
    assert writing.stored == []
    assert writing.writer.counts.dropped_blocks == 5


def test_waiting_blocks_are_bounded_and_known(writing: Writing) -> None:
    one, other, third = chain(range(8)), chain(range(100, 108)), chain(range(200, 208))
    writing.gate.clear()
    assert writing.offer(one, size_bytes=6000)
    assert writing.offer(other, size_bytes=4000)
    assert writing.writer.is_on_the_way(one[1])
    assert writing.writer.is_on_the_way(other[0])
    writing.writer.check_integrity()
    assert not writing.offer(third, size_bytes=1)
    assert writing.writer.counts.dropped_blocks == 2
    assert not writing.writer.drain(timeout_s=0)
    writing.gate.set()
    writing.drain()
    assert not writing.writer.is_on_the_way(one[1])
    assert [writing.store.num_held(prefix) for prefix in (one, other, third)] == [2, 2, 0]


def test_a_prefix_that_was_stored_meanwhile_or_never_fits_changes_nothing(tmp_path: Path) -> None:
    writing = Writing(tmp_path, capacity_bytes=10_000)
    hashes = chain(range(8))
    writing.store.put(hashes, records(hashes))
    assert writing.offer(hashes)
    assert writing.offer(chain(range(1000)))
    writing.drain()
    assert writing.writer.counts.stored_blocks == 0
    assert writing.writer.counts.failures == 0
    assert writing.writer.counts.dropped_blocks == 248, "two of them are there"
    assert writing.writer.usable
    assert writing.writer.close(timeout_s=60)
    writing.store.close()


def test_a_long_prefix_becomes_several_nodes(tmp_path: Path) -> None:
    writing = Writing(tmp_path, capacity_bytes=1_000_000)
    hashes = chain([token % 251 for token in range(NODE_TOKENS * 2 + 400)])
    assert writing.offer(hashes)
    writing.drain()
    size = NODE_TOKENS // LAYOUT.block_tokens
    assert [len(segment.place.hashes) for segment in writing.store.segments()] == [size, size, 100]
    assert writing.store.num_held(hashes) == len(hashes)
    assert writing.writer.close(timeout_s=60)
    writing.store.close()


def test_a_disk_that_fails_is_not_used_until_its_pause_ends(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = chain(range(8)), chain(range(100, 108))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on the device")

    monkeypatch.setattr(os, "fsync", full)
    assert writing.offer(one)
    writing.drain()
    counts = writing.writer.counts
    assert (counts.failures, counts.dropped_blocks, writing.writer.usable) == (1, 2, False)
    assert not writing.offer(other)
    assert counts.dropped_blocks == 4
    writing.clock.now += FIRST_PAUSE_S
    assert writing.offer(one)
    writing.drain()
    assert counts.failures == 2
    monkeypatch.undo()
    writing.clock.now += FIRST_PAUSE_S
    assert not writing.offer(other), "the second pause is longer"
    writing.clock.now += FIRST_PAUSE_S
    assert writing.offer(other)
    writing.drain()
    assert writing.writer.usable
    assert writing.store.num_held(other) == 2


def test_after_any_error_with_one_prefix_the_next_prefix_is_stored(
    writing: Writing, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(start: int, end: int) -> Sequence[LayerRecords]:
        raise RuntimeError(f"no records of {start} to {end}")

    hashes = chain(range(8))
    assert writing.writer.offer(PendingBlocks(hashes, 0, 100, wrong))
    writing.drain()
    counts = writing.writer.counts
    assert (counts.failures, counts.dropped_blocks, writing.writer.usable) == (1, 2, False)
    assert "no records of 0 to 2" in caplog.text
    writing.clock.now += FIRST_PAUSE_S
    assert writing.offer(hashes)
    writing.drain()
    assert writing.store.num_held(hashes) == 2


def test_after_closing_no_block_is_accepted_and_waiting_blocks_are_dropped(writing: Writing) -> None:
    writing.gate.clear()
    for start in range(0, 50, 10):
        assert writing.offer(chain(range(start, start + 8)))
    assert writing.at_the_gate.wait(timeout=60)
    assert not writing.writer.close(timeout_s=0), "one prefix is being written"
    writing.gate.set()
    assert writing.writer.close(timeout_s=60)
    assert not writing.offer(chain(range(100, 108)))
    writing.drain()
    assert len(writing.store.segments()) <= 1


def test_pauses_double_up_to_a_limit_and_end_with_a_success() -> None:
    health, now = Health(), 100.0
    pauses = []
    for _ in range(10):
        assert health.may_try(now=now)
        pauses.append(health.failed(now=now))
        health.check_integrity()
        assert not health.may_try(now=now + pauses[-1] - 0.01)
        now += pauses[-1]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    health.worked()
    health.check_integrity()
    assert health.may_try(now=now)
    assert health.failed(now=now) == FIRST_PAUSE_S
