"""What the prefix table promises, one behaviour at a time.
Chunks are one byte each, so sizes are easy to follow."""

from __future__ import annotations

import pytest

from epp.prefix_index.eviction import charge, evict
from epp.prefix_index.hashing import ChunkSchedule, hash_chain
from epp.prefix_index.integrity import check_integrity
from epp.prefix_index.removal import clear_endpoint, drop_endpoint, undo
from epp.prefix_index.reported import credit
from epp.prefix_index.table import PrefixTable, Recorded
from epp.types import ChunkHash, EndpointName

SCHEDULE = ChunkSchedule(chunk_bytes=1, later_chunk_bytes=1, later_from_bytes=0)
A, B, C = EndpointName("a"), EndpointName("b"), EndpointName("c")


def chain(text: str) -> list[ChunkHash]:
    return hash_chain(text.encode(), seed=1, schedule=SCHEDULE)


def new_table(
    *names: EndpointName, capacity_bytes: int = 1000, max_entries: int = 1000, ttl_s: float = 1000.0
) -> PrefixTable:
    table = PrefixTable(schedule=SCHEDULE, max_entries=max_entries, ttl_s=ttl_s)
    for name in names:
        table.add_endpoint(name, capacity_bytes=capacity_bytes)
    return table


def runs(table: PrefixTable) -> int:
    return len(table.index)


class TestMatch:
    def test_counts_the_leading_chunks_that_each_server_holds(self) -> None:
        table = new_table(A, B, C)
        table.record(A, chain("abcdef"), now=1)
        table.record(B, chain("abcxyz"), now=2)
        assert table.match(chain("abcdefgh")) == {A: 6, B: 3}
        assert table.match(chain("abcx")) == {A: 3, B: 4}
        assert table.match(chain("ab")) == {A: 2, B: 2}
        check_integrity(table)

    def test_of_an_unknown_prompt_or_an_empty_chain_is_empty(self) -> None:
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


class TestRecord:
    def test_says_which_chunks_are_new(self) -> None:
        table = new_table(A, B)
        first = table.record(A, chain("abcdef"), now=1)
        again = table.record(A, chain("abcdef"), now=2)
        longer = table.record(A, chain("abcdefgh"), now=3)
        branch = table.record(A, chain("abcxyz"), now=4)
        elsewhere = table.record(B, chain("abcdef"), now=5)
        assert [(r.first_added, r.added) for r in (first, again, longer, branch, elsewhere)] == [
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
        undo(table, recorded)
        assert (recorded.added, table.entries) == (0, 0)
        check_integrity(table)

    def test_a_server_that_left_meanwhile_is_ignored(self) -> None:
        table = new_table(A)
        drop_endpoint(table, A)
        recorded = table.record(A, chain("abc"), now=1)
        table.touch(A, chain("abc"), now=2)
        charge(table, A, size_bytes=3, now=3)
        undo(table, recorded)
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

    def test_old_splits_heal_when_the_prompt_is_used_again(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abcdefghij"), now=1)
        table.record(B, chain("abcdefghij"), now=1)
        for capacity_bytes in range(9, -1, -1):
            table.resize(B, capacity_bytes=capacity_bytes)
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
        table.resize(A, capacity_bytes=6)
        evict(table, 6)
        assert table.match(chain("abcdef")) == {A: 3, B: 6}
        assert table.match(chain("xyz")) == {A: 3}


class TestUndo:
    def test_takes_back_only_what_was_added(self) -> None:
        table = new_table(A)
        table.record(A, chain("abc"), now=1)
        recorded = table.record(A, chain("abcdef"), now=2)
        undo(table, recorded)
        assert table.match(chain("abcdef")) == {A: 3}
        assert table.mirrors[A].evicted == 0
        check_integrity(table)

    def test_leaves_what_another_request_recorded_since(self) -> None:
        table = new_table(A)
        recorded = table.record(A, chain("abcdef"), now=1)
        table.record(A, chain("abcdxy"), now=2)
        undo(table, recorded)
        assert table.match(chain("abcdef")) == {A: 4}
        assert table.match(chain("abcdxy")) == {A: 6}
        check_integrity(table)

    def test_leaves_what_another_request_touched_since(self) -> None:
        table = new_table(A)
        recorded = table.record(A, chain("abcdef"), now=1)
        table.touch(A, chain("abcd"), now=2)
        undo(table, recorded)
        assert table.match(chain("abcdef")) == {A: 4}
        check_integrity(table)

    def test_leaves_other_servers_alone(self) -> None:
        table = new_table(A, B)
        on_a = table.record(A, chain("abcdef"), now=1)
        table.record(B, chain("abc"), now=2)
        undo(table, on_a)
        assert table.match(chain("abcdef")) == {B: 3}
        check_integrity(table)

    def test_twice_does_nothing_more(self) -> None:
        table = new_table(A)
        recorded = table.record(A, chain("abcdef"), now=1)
        undo(table, recorded)
        table.record(A, chain("abcdef"), now=2)
        undo(table, recorded)
        assert table.match(chain("abcdef")) == {A: 6}
        check_integrity(table)

    def test_of_what_was_partly_evicted_takes_the_rest(self) -> None:
        table = new_table(A, capacity_bytes=4)
        recorded = table.record(A, chain("abcdef"), now=1)
        evict(table, 2)
        undo(table, recorded)
        assert table.entries == 0
        check_integrity(table)

    def test_after_restart_or_departure_touches_nothing_new(self) -> None:
        table = new_table(A)
        before_restart = table.record(A, chain("abc"), now=1)
        clear_endpoint(table, A)
        table.record(A, chain("abc"), now=2)
        undo(table, before_restart)
        assert table.match(chain("abc")) == {A: 3}
        before_departure = table.record(A, chain("abcdef"), now=3)
        drop_endpoint(table, A)
        table.add_endpoint(A, capacity_bytes=10)
        table.record(A, chain("abcdef"), now=4)
        undo(table, before_departure)
        assert table.match(chain("abcdef")) == {A: 6}
        check_integrity(table)


class TestEviction:
    def test_takes_the_least_recently_used_first_and_tails_before_heads(self) -> None:
        table = new_table(A, capacity_bytes=8)
        table.record(A, chain("abcd"), now=1)
        table.record(A, chain("wxyz"), now=2)
        table.record(A, chain("ab"), now=3)  # the head of the first prompt is newer than its tail
        table.record(A, chain("klm"), now=4)
        assert evict(table, 5) == 3
        assert table.match(chain("abcd")) == {A: 2}
        assert table.match(chain("wxyz")) == {A: 3}
        assert table.match(chain("klm")) == {A: 3}
        assert (table.mirrors[A].used_bytes, table.mirrors[A].evicted) == (8, 3)
        check_integrity(table)

    def test_a_touch_saves_what_would_have_gone(self) -> None:
        table = new_table(A, capacity_bytes=6)
        table.record(A, chain("abc"), now=1)
        table.record(A, chain("xyz"), now=2)
        table.touch(A, chain("abcdef"), now=3)
        table.record(A, chain("klm"), now=4)
        evict(table, 5)
        assert table.match(chain("abc")) == {A: 3}
        assert table.match(chain("xyz")) == {}
        check_integrity(table)

    def test_evicts_no_more_than_it_must(self) -> None:
        schedule = ChunkSchedule(chunk_bytes=10, later_chunk_bytes=100, later_from_bytes=20)
        table = PrefixTable(schedule=schedule, max_entries=100, ttl_s=100)
        table.add_endpoint(A, capacity_bytes=200)
        long = hash_chain(bytes(220), seed=1, schedule=schedule)
        table.record(A, long, now=1)  # 10 + 10 + 100 + 100 bytes
        assert evict(table, 2) == 1
        assert (table.mirrors[A].used_bytes, table.mirrors[A].entries) == (120, 3)
        check_integrity(table)

    def test_of_one_copy_leaves_the_other(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abcdef"), now=1)
        table.record(B, chain("abcdef"), now=1)
        table.resize(A, capacity_bytes=2)
        evict(table, 2)
        assert table.match(chain("abcdef")) == {A: 2, B: 6}
        check_integrity(table)

    def test_anonymous_bytes_push_out_older_prompts_and_go_in_their_turn(self) -> None:
        table = new_table(A, capacity_bytes=10)
        table.record(A, chain("abcd"), now=1)
        charge(table, A, size_bytes=7, now=2)
        table.record(A, chain("xy"), now=3)
        assert evict(table, 4) == 3
        assert table.match(chain("abcd")) == {A: 1}
        table.record(A, chain("klmno"), now=5)
        assert evict(table, 6) == 1
        assert table.mirrors[A].used_bytes == 10
        assert table.match(chain("xy")) == {A: 2}
        check_integrity(table)

    def test_charges_in_a_row_take_one_place(self) -> None:
        table = new_table(A, capacity_bytes=10)
        for n in range(1000):
            charge(table, A, size_bytes=1, now=n)
        assert len(list(table.mirrors[A].uses())) == 1
        evict(table, 1001)
        assert table.mirrors[A].used_bytes == 10
        check_integrity(table)

    def test_a_prompt_used_for_ever_takes_one_place(self) -> None:
        table = new_table(A)
        for n in range(1000):
            table.touch(A, chain("abc"), now=n)
            table.record(A, chain("abc"), now=n)
        assert len(list(table.mirrors[A].uses())) == 1

    def test_drops_what_nobody_used_for_the_ttl(self) -> None:
        table = new_table(A, B, ttl_s=10)
        table.record(A, chain("abcd"), now=0)
        charge(table, A, size_bytes=5, now=1)
        table.record(B, chain("wxyz"), now=2)
        table.touch(A, chain("ab"), now=6)
        assert evict(table, 9.9) == 0
        assert evict(table, 11) == 2
        assert table.match(chain("abcd")) == {A: 2}
        assert table.mirrors[A].used_bytes == 2
        assert evict(table, 12) == 4
        assert evict(table, 16) == 2
        assert table.entries == 0
        check_integrity(table)

    def test_holds_the_total_bound_by_taking_the_oldest_of_all_servers(self) -> None:
        table = new_table(A, B, max_entries=6)
        table.record(A, chain("abcd"), now=1)
        table.record(B, chain("wxyz"), now=2)
        table.record(A, chain("kl"), now=3)
        assert evict(table, 4) == 4
        assert (table.entries, table.match(chain("abcd")), table.match(chain("wxyz"))) == (6, {}, {B: 4})
        check_integrity(table)

    def test_holds_the_total_bound_across_servers_in_the_order_of_use(self) -> None:
        table = new_table(A, B, max_entries=2)
        table.record(A, chain("ab"), now=1)
        table.record(B, chain("wx"), now=2)
        table.record(A, chain("cd"), now=3)
        assert evict(table, 4) == 4
        assert (table.match(chain("cd")), table.mirrors[B].entries) == ({A: 2}, 0)

    def test_new_bounds_apply_with_the_next_eviction(self) -> None:
        table = new_table(A, ttl_s=1000)
        table.record(A, chain("abcd"), now=1)
        table.record(A, chain("xyz"), now=5)
        evict(table, 6)
        table.set_bounds(max_entries=5, ttl_s=1000)
        assert (table.entries, evict(table, 7), table.entries) == (7, 2, 5)
        table.set_bounds(max_entries=5, ttl_s=3)
        assert evict(table, 7.5) == 2
        assert evict(table, 8) == 3

    def test_works_in_bounded_portions(self) -> None:
        table = new_table(A, capacity_bytes=0)
        for n in range(20):
            table.record(A, chain(chr(65 + n) * 3), now=n)
        assert [evict(table, 100, budget=5) for _ in range(5)] == [15, 15, 15, 15, 0]
        check_integrity(table)

    def test_time_that_goes_back_does_not_reorder(self) -> None:
        table = new_table(A, capacity_bytes=3)
        table.record(A, chain("abc"), now=10)
        table.record(A, chain("xyz"), now=5)
        check_integrity(table)
        evict(table, 6)
        assert table.match(chain("xyz")) == {A: 3}
        check_integrity(table)


class TestServers:
    def test_a_restart_empties_the_cache_and_keeps_the_server(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abc"), now=1)
        table.record(B, chain("abcdef"), now=1)
        charge(table, A, size_bytes=5, now=2)
        clear_endpoint(table, A)
        assert (list(table.mirrors), table.mirrors[A].used_bytes, table.mirrors[A].entries) == ([A, B], 0, 0)
        assert table.match(chain("abcdef")) == {B: 6}
        check_integrity(table)

    def test_a_restart_leaves_no_cycles_to_the_garbage_collector(self) -> None:
        table = new_table(A)
        for n in range(3):
            table.record(A, chain(str(n)), now=n)
        uses = list(table.mirrors[A].uses())
        clear_endpoint(table, A)
        assert [(use.older, use.newer) for use in uses] == [(None, None)] * 3

    def test_a_new_server_in_a_departed_ones_place_inherits_nothing(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abc"), now=1)
        drop_endpoint(table, A)
        table.add_endpoint(C, capacity_bytes=10)
        assert table.match(chain("abc")) == {}
        table.record(C, chain("abc"), now=2)
        assert table.match(chain("abc")) == {C: 3}
        check_integrity(table)

    def test_a_departed_server_does_not_wait_for_eviction(self) -> None:
        table = new_table(A, capacity_bytes=0)
        table.record(A, chain("abc"), now=1)
        drop_endpoint(table, A)
        assert evict(table, 2) == 0
        check_integrity(table)

    def test_unknown_servers_and_impossible_sizes_are_refused(self) -> None:
        table = new_table(A)
        with pytest.raises(KeyError):
            drop_endpoint(table, B)
        with pytest.raises(ValueError, match="already"):
            table.add_endpoint(A, capacity_bytes=1)
        with pytest.raises(ValueError, match="capacity"):
            table.resize(A, capacity_bytes=-1)
        with pytest.raises(ValueError, match="capacity"):
            table.add_endpoint(B, capacity_bytes=-1)
        for max_entries, ttl_s in ((-1, 1.0), (1, 0.0), (1, float("nan"))):
            with pytest.raises(ValueError, match="bounds"):
                table.set_bounds(max_entries=max_entries, ttl_s=ttl_s)
        assert list(table.mirrors) == [A]

    def test_two_hundred_servers_share_a_prefix(self) -> None:
        names = [EndpointName(f"server-{n}") for n in range(200)]
        table = new_table(*names)
        for n, name in enumerate(names):
            table.record(name, chain("s" * 20)[: n % 20 + 1], now=n)
        assert table.match(chain("s" * 20)) == {name: n % 20 + 1 for n, name in enumerate(names)}
        check_integrity(table)


class TestEqualHashesOfDifferentPrefixes:
    """A client who knows the seed can make them. They may cost matches and must never break the table."""

    def hashes(self, *values: int) -> list[ChunkHash]:
        return [ChunkHash(v) for v in values]

    def test_a_chain_that_repeats_a_hash(self) -> None:
        table = new_table(A, B)
        loop = self.hashes(1, 1, 2, 1, 2)
        table.record(A, loop, now=1)
        table.record(B, loop[:2], now=2)
        table.record(B, self.hashes(1, 1, 3), now=3)
        check_integrity(table)
        table.resize(A, capacity_bytes=1)
        evict(table, 4)
        check_integrity(table)
        assert table.mirrors[A].used_bytes <= 1

    def test_a_later_chunk_that_equals_another_chains_first(self) -> None:
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
        undo(table, recorded)
        check_integrity(table)
        assert table.match(self.hashes(1, 2, 3)) == {A: 3}

    def test_an_eviction_that_cannot_split_takes_the_whole_run(self) -> None:
        table = new_table(A, B)
        table.record(A, self.hashes(1, 2, 3), now=1)
        table.record(B, self.hashes(1, 2, 3), now=2)
        table.record(B, self.hashes(3, 4), now=3)
        table.resize(A, capacity_bytes=2)
        assert evict(table, 4) == 3
        assert table.match(self.hashes(1, 2, 3)) == {B: 3}
        check_integrity(table)


def test_what_a_server_says_it_holds_keeps_what_is_above_it_from_being_undone() -> None:
    table = new_table(A)
    recorded = table.record(A, chain("abcd"), now=1)
    assert credit(table, A, chain("abxy"), now=2)
    undo(table, recorded)
    assert table.match(chain("abcd")) == {A: 2}
    assert table.match(chain("abxy")) == {A: 4}
    check_integrity(table)
