"""What is evicted, in which order, and how much."""

from __future__ import annotations

from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.prefix_index.upkeep import evict
from tests.unit.picker.prefix_index.tables import A, chain, new_table


class TestEviction:
    def test_a_prompt_that_is_used_again_and_again_takes_one_entry(self) -> None:
        table = new_table(A)
        for n in range(1000):
            table.touch(A, chain("abc"), now=n)
            table.record(A, chain("abc"), now=n)
        assert len(table.mirrors[A].uses) == 1

    def test_works_in_bounded_portions(self) -> None:
        table = new_table(A, capacity_bytes=0)
        for n in range(20):
            table.record(A, chain(chr(65 + n) * 3), now=n)
        assert [evict(table, budget=5) for _ in range(5)] == [15, 15, 15, 15, 0]
        check_integrity(table)
