"""Chunk boundaries, chains and roots of the prefix hash."""

from __future__ import annotations

import itertools

import pytest
import xxhash

from epp.prefix_index.hashing import ChunkSchedule, Roots, hash_chain

SMALL = ChunkSchedule(chunk_bytes=4, later_chunk_bytes=10, later_from_bytes=8)


def test_default_schedule_cuts_a_400_kb_prompt_into_448_chunks() -> None:
    schedule = ChunkSchedule()
    assert schedule.chunks_in(16384) == 64
    assert schedule.chunks_in(16384 + 384 * 1024) == 448
    assert schedule.end_bytes(448) == 16384 + 384 * 1024


def test_a_partial_chunk_is_not_counted() -> None:
    assert [SMALL.chunks_in(n) for n in (0, 3, 4, 7, 8, 17, 18, 27, 28)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_early_chunks_keep_their_size_when_they_do_not_divide_the_boundary() -> None:
    schedule = ChunkSchedule(chunk_bytes=5, later_chunk_bytes=10, later_from_bytes=8)
    assert [schedule.end_bytes(k) for k in range(5)] == [0, 5, 10, 20, 30]


def test_later_chunks_may_begin_at_once() -> None:
    schedule = ChunkSchedule(chunk_bytes=5, later_chunk_bytes=7, later_from_bytes=0)
    assert [schedule.end_bytes(k) for k in range(3)] == [0, 7, 14]


@pytest.mark.parametrize(
    "sizes",
    [
        {"chunk_bytes": 0},
        {"chunk_bytes": -1},
        {"later_chunk_bytes": 0},
        {"later_from_bytes": -1},
    ],
)
def test_schedules_that_cut_nothing_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="chunk"):
        ChunkSchedule(**sizes)


def test_each_hash_is_seeded_with_the_one_before() -> None:
    first = xxhash.xxh3_64_intdigest(b"abcd", 99)
    second = xxhash.xxh3_64_intdigest(b"efgh", first)
    third = xxhash.xxh3_64_intdigest(b"0123456789", second)
    assert hash_chain(b"abcdefgh0123456789rest", seed=99, schedule=SMALL) == [first, second, third]


def test_a_prompt_shorter_than_a_chunk_has_no_chain() -> None:
    assert hash_chain(b"abc", seed=99, schedule=SMALL) == []


def test_root_is_stable_across_releases() -> None:
    # Replicas of different builds share hashes. If this value changes, the version of the scheme has to
    # change too.
    assert Roots(ChunkSchedule(), secret=b"k").seed(model="m", cache_salt="s") == 0x98B48AA44E21B44D


def test_roots_differ_by_every_part_and_by_where_it_ends() -> None:
    parts = [("ab", ""), ("a", "b"), ("", "ab"), ("", ""), ("a\x00", "b"), ("a", "\x00b"), ("\udcff", "")]
    schedules = [ChunkSchedule(), SMALL, ChunkSchedule(4, 8, 10), ChunkSchedule(8, 4, 10)]
    roots = [
        Roots(schedule, secret=secret).seed(model=model, cache_salt=salt)
        for schedule, secret, (model, salt) in itertools.product(schedules, (b"", b"a", b"b"), parts)
    ]
    assert len(set(roots)) == len(roots)
