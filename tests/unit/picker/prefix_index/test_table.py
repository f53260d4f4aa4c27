"""What the prefix table promises, one behaviour at a time: chunks, matches, records and equal hashes."""

from __future__ import annotations

import pytest

from epp.base.types import ChunkHash, EndpointName
from epp.picker.prefix_index.eviction import charge, evict
from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.prefix_index.servers import drop_endpoint, resize
from epp.picker.prefix_index.table import ChunkSchedule, PrefixTable, Recorded
from tests.unit.picker.prefix_index.tables import A, B, C, chain, new_table

SMALL = ChunkSchedule(chunk_bytes=4, later_chunk_bytes=10, later_from_bytes=8)


def runs(table: PrefixTable) -> int:
    return len(table.index)


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


class TestMatch:
    def test_counts_the_leading_chunks_that_each_server_holds(self) -> None:
        table = new_table(A, B, C)
        table.record(A, chain("abcdef"), now=1)
        table.record(B, chain("abcxyz"), now=2)
        assert table.match(chain("abcdefgh")) == {A: 6, B: 3}
        assert table.match(chain("abcx")) == {A: 3, B: 4}
        assert table.match(chain("ab")) == {A: 2, B: 2}
        check_integrity(table)

    def test_an_unknown_prompt_and_an_empty_chain_match_nothing(self) -> None:
        table = new_table(A)
        table.record(A, chain("abc"), now=1)
        assert table.match(chain("xbc")) == {}
        assert table.match([]) == {}

    def test_a_chain_that_reaches_known_chunks_only_after_a_gap_matches_nothing(self) -> None:
        table = new_table(A)
        table.record(A, chain("abcdef"), now=1)
        assert table.match(chain("abcdef")[2:]) == {}

    def test_changes_nothing(self) -> None:
        table = new_table(A)
        table.record(A, chain("abcdef"), now=1)
        before = runs(table)
        table.match(chain("abcxyz"))
        assert (runs(table), table.entries) == (before, 6)

    def test_two_hundred_servers_share_a_prefix(self) -> None:
        names = [EndpointName(f"server-{n}") for n in range(200)]
        table = new_table(*names)
        for n, name in enumerate(names):
            table.record(name, chain("s" * 20)[: n % 20 + 1], now=n)
        assert table.match(chain("s" * 20)) == {name: n % 20 + 1 for n, name in enumerate(names)}
        check_integrity(table)


class TestRecord:
    def test_says_which_chunks_are_new(self) -> None:
        table = new_table(A, B)
        first = table.record(A, chain("abcdef"), now=1)
        again = table.record(A, chain("abcdef"), now=2)
        longer = table.record(A, chain("abcdefgh"), now=3)
        branch = table.record(A, chain("abcxyz"), now=4)
        elsewhere = table.record(B, chain("abcdef"), now=5)
        assert [(r.held, r.added) for r in (first, again, longer, branch, elsewhere)] == [
            (0, 6),
            (6, 0),
            (6, 2),
            (3, 3),
            (0, 6),
        ]
        assert (table.mirrors[A].entries, table.mirrors[B].entries, table.entries) == (11, 6, 17)
        check_integrity(table)

    def test_never_evicts(self) -> None:
        table = new_table(A, capacity_bytes=3, max_entries=2)
        table.record(A, chain("abcdef"), now=1)
        assert table.match(chain("abcdef")) == {A: 6}
        assert table.mirrors[A].used_bytes == 6

    def test_an_empty_chain_leaves_no_trace(self) -> None:
        table = new_table(A)
        recorded = table.record(A, [], now=1)
        assert (recorded.added, table.entries) == (0, 0)
        check_integrity(table)

    def test_a_server_that_left_meanwhile_is_ignored(self) -> None:
        table = new_table(A)
        drop_endpoint(table, A)
        recorded = table.record(A, chain("abc"), now=1)
        table.touch(A, chain("abc"), now=2)
        charge(table, A, size_bytes=3, now=3)
        assert (recorded.added, table.entries, list(table.mirrors)) == (0, 0, [])
        check_integrity(table)

    def test_a_growing_conversation_stays_one_run(self) -> None:
        table = new_table(A, B)
        text = "s"
        for turn in range(20):
            text += f"turn {turn}"
            table.record(A, chain(text), now=turn)
            table.touch(A, chain(text), now=turn + 0.5)
        assert runs(table) == 1
        check_integrity(table)

    def test_split_runs_are_joined_when_the_prompt_is_used_again(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abcdefghij"), now=1)
        table.record(B, chain("abcdefghij"), now=1)
        for capacity_bytes in range(9, -1, -1):
            resize(table, B, capacity_bytes=capacity_bytes)
            evict(table, 2)
        assert runs(table) == 10
        table.record(A, chain("abcdefghij"), now=3)
        assert runs(table) == 1
        assert table.match(chain("abcdefghij")) == {A: 10}
        check_integrity(table)

    def test_a_split_stays_while_one_server_used_its_parts_at_different_times(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abcdef"), now=1)
        table.record(B, chain("abcdef"), now=2)
        table.touch(A, chain("abc"), now=3)
        table.record(A, chain("xyz"), now=4)
        table.record(B, chain("abcdef"), now=5)
        check_integrity(table)
        resize(table, A, capacity_bytes=6)
        evict(table, 6)
        assert table.match(chain("abcdef")) == {A: 3, B: 6}
        assert table.match(chain("xyz")) == {A: 3}


def test_impossible_bounds_are_refused() -> None:
    table = new_table(A)
    for max_entries, ttl_s in ((-1, 1.0), (1, 0.0), (1, float("nan"))):
        with pytest.raises(ValueError, match="bounds"):
            table.set_bounds(max_entries=max_entries, ttl_s=ttl_s)


class TestEqualHashesOfDifferentPrefixes:
    """A client who knows the seed can make such hashes. They may cost matches, but never break the table."""

    def hashes(self, *values: int) -> list[ChunkHash]:
        return [ChunkHash(v) for v in values]

    def test_a_chain_that_repeats_a_hash_does_not_break_the_table(self) -> None:
        table = new_table(A, B)
        loop = self.hashes(1, 1, 2, 1, 2)
        table.record(A, loop, now=1)
        table.record(B, loop[:2], now=2)
        table.record(B, self.hashes(1, 1, 3), now=3)
        check_integrity(table)
        resize(table, A, capacity_bytes=1)
        evict(table, 4)
        check_integrity(table)
        assert table.mirrors[A].used_bytes <= 1

    def test_a_later_chunk_that_equals_the_first_of_another_chain_does_not_break_the_table(self) -> None:
        table = new_table(A)
        table.record(A, self.hashes(1, 2, 3), now=1)
        recorded = table.record(A, self.hashes(7, 1, 2, 3), now=2)
        assert table.match(self.hashes(7, 1, 2, 3)) == {A: recorded.added}
        table.record(A, self.hashes(7, 1, 9), now=3)
        table.record(A, self.hashes(5, 6), now=4)
        follow = table.record(A, self.hashes(5, 6, 1, 2), now=5)
        assert follow.added == 0
        check_integrity(table)

    def test_a_split_that_is_refused_records_the_part_above(self) -> None:
        table = new_table(A, B)
        table.record(A, self.hashes(1, 2, 3), now=1)
        table.record(A, self.hashes(2, 5), now=2)
        recorded: Recorded = table.record(B, self.hashes(1, 8), now=3)
        assert recorded.added == 0
        table.touch(A, self.hashes(1), now=4)
        check_integrity(table)
        assert table.match(self.hashes(1, 2, 3)) == {A: 3}

    def test_an_eviction_that_cannot_split_takes_the_whole_run(self) -> None:
        table = new_table(A, B)
        table.record(A, self.hashes(1, 2, 3), now=1)
        table.record(B, self.hashes(1, 2, 3), now=2)
        table.record(B, self.hashes(3, 4), now=3)
        resize(table, A, capacity_bytes=2)
        assert evict(table, 4) == 3
        assert table.match(self.hashes(1, 2, 3)) == {B: 3}
        check_integrity(table)
