"""What a guess writes, what it never evicts, and what is left of it."""

from __future__ import annotations

from epp.picker.guesses import drop_guess, guess_chain
from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.prefix_index.upkeep import add_endpoint, clear_endpoint, drop_endpoint
from tests.unit.picker.prefix_index.tables import A, chain, new_table


def test_a_guess_is_void_after_a_restart_or_a_departure() -> None:
    table = new_table(A)
    table.record(A, chain("a"), now=1)
    before_restart = guess_chain(table, A, chain("abc"))
    clear_endpoint(table, A)
    assert table.match(chain("abc")) == {}
    before_departure = guess_chain(table, A, chain("abc"))
    drop_guess(table, before_restart)
    assert table.match(chain("abc")) == {A: 3}
    drop_endpoint(table, A)
    add_endpoint(table, A, capacity_bytes=10)
    guess_chain(table, A, chain("abc"))
    drop_guess(table, before_departure)
    assert table.match(chain("abc")) == {A: 3}
    check_integrity(table)
