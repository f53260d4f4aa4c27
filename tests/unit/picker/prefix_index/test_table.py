"""What the prefix table promises, one behaviour at a time."""

from array import array

from epp.config.policy import Chunks
from epp.picker.prefix_index.table import Run, chunks_in, end_bytes
from epp.picker.prefix_index.upkeep import evict, resize
from tests.invariants.table import check_table
from tests.unit.picker.prefix_index.tables import A, B, chain, new_table


def test_default_schedule_cuts_a_400_kb_prompt_into_448_chunks() -> None:
    schedule = Chunks()
    assert chunks_in(schedule, 16384) == 64
    assert chunks_in(schedule, 16384 + 384 * 1024) == 448
    assert end_bytes(schedule, 448) == 16384 + 384 * 1024


class TestRecord:
    def test_a_growing_conversation_stays_one_run(self) -> None:
        table = new_table(A, B)
        text = "s"
        for turn in range(20):
            text += f"turn {turn}"
            table.record(A, chain(text), now=turn)
            table.touch(A, chain(text), now=turn + 0.5)
        assert len(table.index) == 1
        check_table(table)

    def test_split_runs_are_joined_when_the_prompt_is_used_again(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abcdefghij"), now=1)
        table.record(B, chain("abcdefghij"), now=1)
        for capacity_bytes in range(9, -1, -1):
            resize(table, B, capacity_bytes=capacity_bytes)
            evict(table)
        assert len(table.index) == 10
        table.record(A, chain("abcdefghij"), now=3)
        assert len(table.index) == 1
        assert table.match(chain("abcdefghij")) == {A: 10}
        check_table(table)


def test_a_long_chain_of_runs_can_be_dropped_at_once() -> None:
    run = None
    for n in range(300_000):
        run = Run(array("Q", [n]), n, run)
    del run  # each run is freed by the end of the next one


class TestEviction:
    def test_works_in_bounded_portions(self) -> None:
        table = new_table(A, capacity_bytes=0)
        for n in range(20):
            table.record(A, chain(chr(65 + n) * 3), now=n)
        for left in (45, 30, 15, 0):
            evict(table, budget=5)
            assert table.entries == left
        check_table(table)
