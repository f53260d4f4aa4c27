"""The disk tier returns what was stored, whatever happened to the process or to the files."""

import dataclasses
import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from model_server.core.hashing import BlockHash
from model_server.tiers.errors import DamagedSegmentError, LayoutMismatchError, StoreError
from model_server.tiers.layout import TokenOrder
from model_server.tiers.store import PrefixStore
from tests.unit.model_server.tiers.stored_prefixes import (
    CAPACITY,
    LAYOUT,
    chain,
    check_segment,
    opened,
    random_order,
    random_prefix,
    records,
)


def covered(store: PrefixStore, hashes: Sequence[BlockHash]) -> int:
    return sum(num_blocks for _, num_blocks in store.match(hashes))


def test_random_prefixes_come_back_after_all_that_can_happen(tmp_path: Path) -> None:
    rng = random.Random(1)
    store = opened(tmp_path)
    for step in range(120):
        hashes = random_prefix(rng)
        new = len(hashes) - covered(store, hashes)
        assert store.put(hashes, records(hashes)) == new
        assert covered(store, hashes) == len(hashes)
        if step % 3 == 0:
            own = rng.choice(store.segments())
            orders = [random_order(rng, own.num_tokens) for _ in range(LAYOUT.num_layers)]
            reordered = store.reorder(own, orders)
            assert reordered is not None
            assert reordered.orders == orders
        if step % 20 == 0:
            store.close()
            store = opened(tmp_path)
            assert covered(store, hashes) == len(hashes)
        store.check_integrity()
    for own in store.segments():
        check_segment(own)
    assert 0.5 * CAPACITY < store.used_bytes <= CAPACITY, "the limit was reached"


def test_002_3_reordering_changes_neither_matching_nor_bytes_that_are_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    hashes = chain(range(24))
    store.put(hashes, records(hashes))
    [(before, _)] = store.match(hashes)
    order = TokenOrder.by_importance([float(token % 3 == 0) for token in range(24)])
    after = store.reorder(before, [order, order])
    assert after is not None
    assert covered(store, hashes) == len(hashes)
    assert [after.layer(0), after.layer(1)] == [before.layer(0), before.layer(1)] == records(hashes)
    important = range(0, 24, 3)
    assert len({before.orders[0].slots[token] // 3 for token in important}) == 8
    assert len({after.orders[0].slots[token] // 3 for token in important}) == 3
    assert store.reorder(before, [order, order]) is None, "the node was reordered in between"


@pytest.mark.parametrize("field", ["model", "dtype", "num_layers", "rest_bytes", "chunk_tokens"])
def test_kv_of_another_model_type_or_layout_is_refused(tmp_path: Path, field: str) -> None:
    opened(tmp_path).close()
    other: Any = {"model": "other", "dtype": "bfloat16"}.get(field, 7)
    layout = dataclasses.replace(LAYOUT, **{field: other})
    with pytest.raises(LayoutMismatchError, match=f"another {field}"):
        PrefixStore(tmp_path, layout, capacity_bytes=CAPACITY)
    opened(tmp_path).close()


def test_a_second_process_and_records_of_another_shape_are_refused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(StoreError, match="in use"):
        opened(tmp_path)
    hashes = chain(range(8))
    with pytest.raises(StoreError, match="2 layers and 8 tokens"):
        store.put(hashes, records(hashes)[:1])
    store.check_integrity()


def test_a_segment_cut_off_at_any_byte_is_dropped_and_the_rest_is_readable(tmp_path: Path) -> None:
    one, longer = chain(range(4)), chain(range(8))
    store = opened(tmp_path)
    store.put(one, records(one))
    store.put(longer, records(longer))
    store.close()
    whole = {path: path.read_bytes() for path in tmp_path.glob("*.kv")}
    [root, leaf] = (tmp_path / f"{longer[index].hex()}.kv" for index in range(2))
    for cut, left in ((leaf, 1), (root, 0)):
        for length in range(len(whole[cut])):
            for path, content in whole.items():
                path.write_bytes(content)
            os.truncate(cut, length)
            store = opened(tmp_path)
            store.check_integrity()
            assert covered(store, longer) == left
            store.close()
            assert not cut.exists()


def test_a_byte_that_has_changed_is_noticed_and_the_node_is_dropped(tmp_path: Path) -> None:
    hashes = chain(range(8))
    store = opened(tmp_path)
    store.put(hashes, records(hashes))
    [own] = store.segments()
    content = own.path.read_bytes()
    data = len(content) - LAYOUT.data_bytes(8)
    for place in range(data, len(content)):
        with own.path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([content[place] ^ 1]))
        with pytest.raises(DamagedSegmentError):
            own.check_integrity()
        with own.path.open("r+b") as file:
            file.seek(place)
            file.write(content[place : place + 1])
    own.check_integrity()
    store.drop_damaged(own)
    store.check_integrity()
    assert covered(store, hashes) == 0


def test_a_full_disk_keeps_the_blocks_that_were_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = chain(range(12)), chain([0, 1, 2, 3, 9, 9, 9, 9])
    store = opened(tmp_path)
    store.put(one, records(one))
    real = os.fsync
    calls = iter(range(100))

    def fails_late(number: int) -> None:
        if next(calls) >= 1:
            raise OSError(errno.ENOSPC, "no space")
        real(number)

    monkeypatch.setattr(os, "fsync", fails_late)
    with pytest.raises(OSError, match="no space"):
        store.put(other, records(other))
    monkeypatch.undo()
    store.check_integrity()
    assert covered(store, one) == 3
    assert store.put(other, records(other)) == 1
    for own in store.segments():
        check_segment(own)


@pytest.mark.slow
def test_a_killed_writer_leaves_a_readable_store(tmp_path: Path) -> None:
    for seed in range(6):
        with subprocess.Popen(
            [sys.executable, "-m", "tests.unit.model_server.tiers.stored_prefixes", str(tmp_path), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            for _ in range(3 + 5 * seed):
                assert writer.stdout.readline() == "written\n"
            writer.kill()
        store = opened(tmp_path)
        store.check_integrity()
        assert store.segments()
        for own in store.segments():
            check_segment(own)
        store.close()


def test_readers_never_see_a_half_written_node_while_it_is_reordered(tmp_path: Path) -> None:
    store = opened(tmp_path)
    hashes = chain(range(40))
    store.put(hashes, records(hashes))
    expected = records(hashes)
    stop = threading.Event()
    seen: list[tuple[int, bool]] = []

    def read() -> None:
        while not stop.is_set():
            [(own, _)] = store.match(hashes)
            seen.append((id(own), [own.layer(0), own.layer(1)] == expected))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    rng = random.Random(5)
    try:
        while len({own for own, _ in seen}) < 3:
            [own] = store.segments()
            assert store.reorder(own, [random_order(rng, 40) for _ in range(2)]) is not None
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert all(right for _, right in seen)
    store.check_integrity()
