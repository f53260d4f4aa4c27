"""What a guess writes, what it never evicts, and what is left of it."""

from __future__ import annotations

from epp.picker.guesses import drop_guess, guess_chain
from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.prefix_index.upkeep import add_endpoint, clear_endpoint, drop_endpoint, evict
from tests.unit.picker.prefix_index.tables import A, chain, new_table


def test_a_guess_matches_at_once_and_evicts_nothing_that_is_proven() -> None:
    table = new_table(A, capacity_bytes=8)
    table.record(A, chain("abcdefgh"), now=1)
    guess_chain(table, A, chain("ab1234"))
    evict(table)
    assert table.match(chain("abcdefgh")) == {A: 8}
    assert table.match(chain("ab1234")) == {A: 6}
    check_integrity(table)


def test_guesses_take_half_of_a_cache_and_the_newest_goes_first() -> None:
    table = new_table(A, capacity_bytes=8)
    for text, fits in (("abc", 3), ("xyz", 1), ("uvw", 0), ("abcd", 3)):
        guess_chain(table, A, chain(text))
        assert table.match(chain(text)).get(A, 0) == fits, text
    check_integrity(table)


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
