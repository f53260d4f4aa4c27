"""`check_integrity` finds a broken invariant of the table, whichever it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.prefix_index.servers import clear_endpoint
from epp.picker.prefix_index.table import PrefixTable, Run, Use
from tests.unit.picker.prefix_index.tables import A, B, chain, new_table


def a_table() -> PrefixTable:
    """Return a table with a run that both servers hold, and a run below it for each of them."""
    table = new_table(A, B)
    table.record(A, chain("abcd"), now=1)
    table.record(B, chain("abxy"), now=2)
    table.record(A, chain("klm"), now=3)
    return table


def run_at(table: PrefixTable, text: str) -> Run:
    """Return the run that the last chunk of a prompt begins."""
    return table.index[chain(text)[-1]]


def miscount_entries(table: PrefixTable) -> None:
    table.entries += 1


def miscount_entries_of_a_mirror(table: PrefixTable) -> None:
    table.mirrors[A].entries += 1
    table.entries += 1


def miscount_bytes(table: PrefixTable) -> None:
    table.mirrors[A].used_bytes -= 1


def exceed_the_capacity_unseen(table: PrefixTable) -> None:
    table.mirrors[A].capacity_bytes = 1


def lose_a_run_from_the_index(table: PrefixTable) -> None:
    del table.index[chain("k")[0]]


def index_a_run_by_another_hash(table: PrefixTable) -> None:
    table.index[chain("z")[0]] = table.index.pop(chain("k")[0])


def keep_a_run_that_nobody_holds(table: PrefixTable) -> None:
    del table.mirrors[A].last_use[run_at(table, "k")]


def hide_a_holder_from_the_mask(table: PrefixTable) -> None:
    run_at(table, "abc").holders = 0


def leave_a_gap_below_the_parent(table: PrefixTable) -> None:
    run_at(table, "abc").start += 1


def take_the_parent_away(table: PrefixTable) -> None:
    run_at(table, "abc").parent = None


def miscount_children(table: PrefixTable) -> None:
    run_at(table, "a").children = 1


def lose_a_use(table: PrefixTable) -> None:
    mirror = table.mirrors[A]
    assert mirror.oldest is not None
    mirror.unlink(mirror.oldest)


def put_uses_out_of_order(table: PrefixTable) -> None:
    mirror = table.mirrors[A]
    assert mirror.oldest is not None
    mirror.oldest.at = 9


def evict_a_head_before_its_tail(table: PrefixTable) -> None:
    mirror, tail = table.mirrors[A], run_at(table, "abc")
    assert mirror.oldest is not None
    mirror.oldest.leaf = tail.parent
    mirror.last_use[tail] = Use(9, tail)
    mirror.append(mirror.last_use[tail])


def exchange_the_places_of_two_mirrors(table: PrefixTable) -> None:
    table.by_bit.reverse()


def hide_a_server(table: PrefixTable) -> None:
    table.hidden |= table.mirrors[A].bit


def wait_for_a_server_that_has_left(table: PrefixTable) -> None:
    table.over[table.mirrors.pop(A)] = None


@pytest.mark.parametrize(
    ("breaks", "fault"),
    [
        (miscount_entries, "entries miscounted"),
        (miscount_entries_of_a_mirror, "entries of a mirror miscounted"),
        (miscount_bytes, "bytes miscounted"),
        (exceed_the_capacity_unseen, "over its capacity"),
        (lose_a_run_from_the_index, "not indexed"),
        (index_a_run_by_another_hash, "another run's key"),
        (keep_a_run_that_nobody_holds, "a run that nobody holds"),
        (hide_a_holder_from_the_mask, "mask and mirrors disagree"),
        (leave_a_gap_below_the_parent, "a gap"),
        (take_the_parent_away, "an orphan"),
        (miscount_children, "children miscounted"),
        (lose_a_use, "no use leads to"),
        (put_uses_out_of_order, "uses in disorder"),
        (evict_a_head_before_its_tail, "a prefix would go before its tail"),
        (exchange_the_places_of_two_mirrors, "another's place"),
        (hide_a_server, "hidden"),
        (wait_for_a_server_that_has_left, "a server that left"),
    ],
)
def test_a_broken_invariant_is_found(breaks: Callable[[PrefixTable], None], fault: str) -> None:
    table = a_table()
    check_integrity(table)
    breaks(table)
    with pytest.raises(AssertionError, match=fault):
        check_integrity(table)


def test_a_mirror_that_is_over_its_capacity_is_valid_while_eviction_will_see_it() -> None:
    table = new_table(A, capacity_bytes=2)
    table.record(A, chain("abcd"), now=1)
    check_integrity(table)
    table.over.clear()
    with pytest.raises(AssertionError, match="eviction would not see it"):
        check_integrity(table)


def test_an_emptied_server_is_valid() -> None:
    table = a_table()
    clear_endpoint(table, A)
    check_integrity(table)
    assert table.match(chain("abcd")) == {B: 2}
