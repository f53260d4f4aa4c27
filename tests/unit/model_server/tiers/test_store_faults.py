"""The disk tier with failing system calls, forged folders and too many files."""

import errno
import inspect
import json
import os
import random
import resource
import stat
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from model_server.core.hashing import BlockHash
from model_server.tiers.errors import DamagedSegmentError, StoreError
from model_server.tiers.layout import TokenOrder
from tests.unit.model_server.tiers.stored_prefixes import (
    LAYOUT,
    chain,
    check_segment,
    opened,
    put,
    random_order,
    random_prefix,
    records,
)

ONE = chain(range(12))


@contextmanager
def few_files() -> Iterator[None]:
    """Limit the files of the process to those that it has open, and 40 more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (max(int(number.name) for number in Path("/proc/self/fd").iterdir()) + 40, before[1]),
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_store_has_more_segments_than_its_process_may_have_open_files(tmp_path: Path) -> None:
    prefixes = [chain(range(start, start + 8)) for start in range(0, 800, 8)]
    with few_files():
        store = opened(tmp_path, capacity_bytes=1_000_000)
        for hashes in prefixes:
            put(store, hashes)
        store.close()
        store = opened(tmp_path, capacity_bytes=1_000_000)
        for own in store.segments():
            check_segment(own)
        store.check_integrity()
    assert [store.num_held(hashes) for hashes in prefixes] == [2] * 100


def test_a_replaced_or_removed_segment_is_read_only_while_it_is_open(tmp_path: Path) -> None:
    store = opened(tmp_path, max_open_files=1)
    put(store, ONE)
    [(before, _)] = store.match(ONE)
    order = TokenOrder.by_importance([float(token % 3 == 0) for token in range(12)])
    assert store.reorder(before, [order, order]) is not None
    put(store, chain(range(100, 108)))
    with pytest.raises(DamagedSegmentError, match="replaced"):
        before.layer(0)
    store.drop_unreadable([before])
    assert store.num_held(ONE) == 3, "the new segment is whole"
    [(after, _)] = store.match(ONE)
    after.path.unlink()
    put(store, chain(range(200, 208)))
    with pytest.raises(DamagedSegmentError, match="removed"):
        after.layer(0)
    store.drop_unreadable([after])
    store.check_integrity()
    assert store.num_held(ONE) == 0


def test_a_prefix_that_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, ONE)
    long = chain([0, 1, 2, 3, *range(5000)])
    with pytest.raises(StoreError, match="do not fit"):
        put(store, long)
    with pytest.raises(StoreError, match="do not fit"):
        put(store, chain(range(1, 5001)))
    assert store.num_held(ONE) == 3
    store.check_integrity()


def test_the_least_recently_used_leaf_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    def prefix(start: int) -> list[BlockHash]:
        return chain(range(start, start + 80))

    tall = [prefix(1000)[:10], prefix(1000)]
    store = opened(tmp_path)
    for hashes in (*tall, prefix(2000), prefix(3000)):
        put(store, hashes)
    newest = store.find(prefix(3000)[0])
    assert newest is not None
    store.close()
    for age, hashes in enumerate((prefix(1000), prefix(1000)[10:], prefix(2000), prefix(3000)), 1):
        os.utime(tmp_path / f"{hashes[0].hex()}.kv", ns=(0, 1_000_000_000 * age))
    room = 2 * newest.size_bytes + 10
    store = opened(tmp_path, capacity_bytes=room)
    store.check_integrity()
    assert [store.num_held(hashes) for hashes in (tall[1], prefix(2000), prefix(3000))] == [0, 20, 20]
    store.close()
    store = opened(tmp_path)
    store.match(prefix(2000))
    for start in count(4000, 1000):
        put(store, prefix(start))
        store.check_integrity()
        if not store.num_held(prefix(3000)):
            break
        assert start < 20_000
    assert store.num_held(prefix(2000)) == 20, "this prefix was used last"
    store.close()


class FailingDisk:
    """While this is on, system calls fail from time to time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self.on = False
        self._rng = rng
        for name in ("fsync", "rename", "unlink", "open", "pread"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.on and self._rng.random() < 0.06:
                raise OSError(self._rng.choice([errno.EIO, errno.ENOSPC, errno.EMFILE]), "made up")
            return real(*args, **options)

        return call


@pytest.mark.parametrize("seed", range(6))
def test_tree_sizes_and_files_agree_whatever_system_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    failing = FailingDisk(monkeypatch, rng)
    store = opened(tmp_path, max_open_files=4)
    for _ in range(50):
        hashes, segments = random_prefix(rng), store.segments()
        what = rng.choice(["put", "put", "put", "reorder", "drop"])
        failing.on = True
        with suppress(OSError, StoreError):
            if what == "put" or not segments:
                put(store, hashes)
            elif what == "reorder":
                own = rng.choice(segments)
                store.reorder(own, [random_order(rng, own.num_tokens) for _ in range(LAYOUT.num_layers)])
            else:
                store.drop_unreadable([rng.choice(segments)])
        failing.on = False
        for path in set(tmp_path.glob("*.kv")) - {own.path for own in store.segments()}:
            path.unlink()  # the files that could not be removed
        store.check_integrity()
    for own in store.segments():
        check_segment(own)
    store.close()
    store = opened(tmp_path)
    store.check_integrity()
    for own in store.segments():
        check_segment(own)
    store.close()


def test_chain_with_more_nodes_than_recursion_limit_is_removed_in_one_step(tmp_path: Path) -> None:
    """Each turn of a long conversation adds a node below the last one."""
    store = opened(tmp_path, capacity_bytes=10_000_000)
    hashes = chain([token % 250 for token in range(4 * 200)])
    layers = records(hashes[:1])
    for end in range(1, 201):
        store.put(hashes[:end], layers, first_block=end - 1)
    root = store.find(hashes[0])
    assert root is not None
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        store.drop_damaged(root)
    finally:
        sys.setrecursionlimit(before)
    assert store.segments() == []
    store.check_integrity()


def test_only_the_owner_can_read_the_stored_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = opened(tmp_path / "new")
        put(store, ONE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    names = sorted(path.suffix for path in (tmp_path / "new").iterdir())
    assert names == ["", ".json", ".kv"]
    for path in (tmp_path / "new").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def segment_of(
    *, parts: dict[str, Any] | None = None, slots: list[int] | None = None, checksums: int | None = None
) -> bytes:
    """Return a segment of the first prefix. Its own CRC is right, and everything else may be wrong."""
    described: dict[str, Any] = {
        "layout": asdict(LAYOUT),
        "hashes": [block.hex() for block in ONE],
        "first_block": 0,
        "parent": None,
    } | (parts or {})
    num_tokens = (
        len(described["hashes"]) * LAYOUT.block_tokens if isinstance(described["hashes"], list) else 12
    )
    order = slots if slots is not None else list(range(num_tokens))
    num_checksums = 2 * (1 + LAYOUT.num_chunks(num_tokens)) if checksums is None else checksums
    text = (
        json.dumps(described).encode()
        + b"\n"
        + struct.pack(f"<{2 * len(order)}H", *order, *order)
        + struct.pack(f"<{num_checksums}I", *range(num_checksums))
    )
    preamble = struct.pack("<8sII", b"PGKVSEG1", len(text), zlib.crc32(text))
    return preamble + text + bytes(LAYOUT.data_bytes(num_tokens))


def deep() -> bytes:
    text = b"[" * 60_000
    return struct.pack("<8sII", b"PGKVSEG1", len(text), zlib.crc32(text)) + text


HOSTILE: dict[str, Callable[[], bytes]] = {
    "no blocks": lambda: segment_of(parts={"hashes": []}),
    "blocks twice": lambda: segment_of(parts={"hashes": [ONE[0].hex()] * 2}),
    "numbers for blocks": lambda: segment_of(parts={"hashes": [1, 2, 3]}),
    "a text for a place": lambda: segment_of(parts={"first_block": "0"}),
    "a place before the first": lambda: segment_of(parts={"first_block": -1}),
    "a list for a parent": lambda: segment_of(parts={"first_block": 1, "parent": []}),
    "slots outside": lambda: segment_of(slots=[*range(11), 65_535]),
    "slots twice": lambda: segment_of(slots=[0] * 12),
    "too few checksums": lambda: segment_of(checksums=1),
    "too many checksums": lambda: segment_of(checksums=50),
    "another layout": lambda: segment_of(parts={"layout": {}}),
    "nested too deep": deep,
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_forged_segment_is_dropped_at_the_start(tmp_path: Path, how: str) -> None:
    whole = chain(range(100, 108))
    store = opened(tmp_path)
    put(store, whole)
    store.close()
    path = tmp_path / f"{ONE[0].hex()}.kv"
    path.write_bytes(HOSTILE[how]())
    store = opened(tmp_path)
    store.check_integrity()
    assert [store.num_held(hashes) for hashes in (ONE, whole)] == [0, 2]
    assert not path.exists()
    store.close()


def test_the_forged_segments_have_only_the_named_fault(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.close()
    (tmp_path / f"{ONE[0].hex()}.kv").write_bytes(segment_of())
    store = opened(tmp_path)
    assert store.num_held(ONE) == 3
    with pytest.raises(DamagedSegmentError):
        store.segments()[0].layer(0)
    store.close()


def test_a_forged_length_reserves_no_memory(tmp_path: Path) -> None:
    opened(tmp_path).close()
    for name, size_bytes in (("aa", 100), ("bb", 1 << 32)):
        with (tmp_path / f"{name}.kv").open("wb") as file:
            file.write(struct.pack("<8sII", b"PGKVSEG1", 0xFFFFFF00, 0))
            file.truncate(size_bytes)
    tracemalloc.start()
    store = opened(tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2_000_000
    assert store.segments() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "manifest.json"]
    store.close()


def test_a_symbolic_link_is_not_followed_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    put(store, ONE)
    store.close()
    real = tmp_path / "store" / f"{ONE[0].hex()}.kv"
    real.rename(tmp_path / "elsewhere")
    real.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "store" / "ff.kv")
    store = opened(tmp_path / "store")
    assert store.segments() == []
    assert (tmp_path / "elsewhere").exists()
    assert not real.is_symlink()
    store.close()


def test_an_unusable_folder_is_one_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    opened(folder).close()
    (folder / "aa.kv").mkdir()
    with pytest.raises(StoreError, match="repair or remove the folder, or give another folder"):
        opened(folder)
    (folder / "aa.kv").rmdir()
    (folder / "manifest.json").write_text("[" * 60_000)
    with pytest.raises(StoreError, match="remove the folder"):
        opened(folder)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="give another folder"):
        opened(tmp_path / "file")

    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuses)
    with pytest.raises(StoreError, match="no locks available"):
        opened(tmp_path / "other")


def test_a_description_that_cannot_be_read_costs_only_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    whole = chain(range(100, 108))
    put(store, ONE)
    put(store, whole)
    store.close()
    bad = (tmp_path / f"{ONE[0].hex()}.kv").stat().st_ino
    real = os.pread

    def pread(number: int, num_bytes: int, offset: int) -> bytes:
        if os.fstat(number).st_ino == bad:
            raise OSError(errno.EIO, "input/output error")
        return real(number, num_bytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    store = opened(tmp_path)
    assert [store.num_held(hashes) for hashes in (ONE, whole)] == [0, 2]
    store.check_integrity()
    store.close()
