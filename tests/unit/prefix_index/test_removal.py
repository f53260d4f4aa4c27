"""Which chunks are undone, and which are removed with a server that restarts or leaves."""

from __future__ import annotations

from epp.prefix_index.eviction import evict
from epp.prefix_index.integrity import check_integrity
from epp.prefix_index.removal import undo
from epp.prefix_index.reported import credit
from epp.prefix_index.servers import add_endpoint, clear_endpoint, drop_endpoint
from tests.unit.prefix_index.tables import A, B, chain, new_table


class TestUndo:
    def test_only_the_chunks_that_the_request_added_are_removed(self) -> None:
        table = new_table(A)
        table.record(A, chain("abc"), now=1)
        recorded = table.record(A, chain("abcdef"), now=2)
        undo(table, recorded)
        assert table.match(chain("abcdef")) == {A: 3}
        assert table.mirrors[A].evicted == 0
        check_integrity(table)

    def test_chunks_that_another_request_recorded_since_stay(self) -> None:
        table = new_table(A)
        recorded = table.record(A, chain("abcdef"), now=1)
        table.record(A, chain("abcdxy"), now=2)
        undo(table, recorded)
        assert table.match(chain("abcdef")) == {A: 4}
        assert table.match(chain("abcdxy")) == {A: 6}
        check_integrity(table)

    def test_chunks_that_another_request_touched_since_stay(self) -> None:
        table = new_table(A)
        recorded = table.record(A, chain("abcdef"), now=1)
        table.touch(A, chain("abcd"), now=2)
        undo(table, recorded)
        assert table.match(chain("abcdef")) == {A: 4}
        check_integrity(table)

    def test_chunks_of_other_servers_stay(self) -> None:
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

    def test_the_rest_of_a_partly_evicted_prompt_is_removed(self) -> None:
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
        add_endpoint(table, A, capacity_bytes=10)
        table.record(A, chain("abcdef"), now=4)
        undo(table, before_departure)
        assert table.match(chain("abcdef")) == {A: 6}
        check_integrity(table)


def test_chunks_before_reported_chunks_are_not_undone() -> None:
    table = new_table(A)
    recorded = table.record(A, chain("abcd"), now=1)
    assert credit(table, A, chain("abxy"), now=2)
    undo(table, recorded)
    assert table.match(chain("abcd")) == {A: 2}
    assert table.match(chain("abxy")) == {A: 4}
    check_integrity(table)
