"""What is evicted, in which order, and how much."""

from __future__ import annotations

from epp.picker.prefix_index.eviction import charge, evict
from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.prefix_index.servers import add_endpoint, resize
from epp.picker.prefix_index.table import ChunkSchedule, PrefixTable
from epp.picker.server_caches import hash_chain
from tests.unit.picker.prefix_index.tables import A, B, chain, new_table


class TestEviction:
    def test_the_least_recently_used_go_first_and_tails_before_heads(self) -> None:
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

    def test_a_touch_keeps_a_prompt_that_would_have_been_evicted(self) -> None:
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
        add_endpoint(table, A, capacity_bytes=200)
        long = hash_chain(bytes(220), seed=1, schedule=schedule)
        table.record(A, long, now=1)  # 10 + 10 + 100 + 100 bytes
        assert evict(table, 2) == 1
        assert (table.mirrors[A].used_bytes, table.mirrors[A].entries) == (120, 3)
        check_integrity(table)

    def test_the_eviction_of_one_copy_keeps_the_other(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abcdef"), now=1)
        table.record(B, chain("abcdef"), now=1)
        resize(table, A, capacity_bytes=2)
        evict(table, 2)
        assert table.match(chain("abcdef")) == {A: 2, B: 6}
        check_integrity(table)

    def test_unnamed_bytes_evict_older_prompts_and_are_evicted_in_turn(self) -> None:
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

    def test_consecutive_charges_take_one_entry(self) -> None:
        table = new_table(A, capacity_bytes=10)
        for n in range(1000):
            charge(table, A, size_bytes=1, now=n)
        assert len(list(table.mirrors[A].uses())) == 1
        evict(table, 1001)
        assert table.mirrors[A].used_bytes == 10
        check_integrity(table)

    def test_a_prompt_that_is_used_again_and_again_takes_one_entry(self) -> None:
        table = new_table(A)
        for n in range(1000):
            table.touch(A, chain("abc"), now=n)
            table.record(A, chain("abc"), now=n)
        assert len(list(table.mirrors[A].uses())) == 1

    def test_entries_that_were_not_used_for_the_ttl_are_dropped(self) -> None:
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

    def test_a_clock_that_goes_back_does_not_change_the_order(self) -> None:
        table = new_table(A, capacity_bytes=3)
        table.record(A, chain("abc"), now=10)
        table.record(A, chain("xyz"), now=5)
        check_integrity(table)
        evict(table, 6)
        assert table.match(chain("xyz")) == {A: 3}
        check_integrity(table)
