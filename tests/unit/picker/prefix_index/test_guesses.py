"""What a guess writes, what it never evicts, and what is left of it."""

from __future__ import annotations

from epp.picker.prefix_index.guesses import drop, guess, prove
from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.prefix_index.reported import credit
from epp.picker.prefix_index.upkeep import add_endpoint, clear_endpoint, drop_endpoint, evict
from tests.unit.picker.prefix_index.tables import A, B, chain, new_table


def test_a_guess_matches_at_once_and_evicts_nothing_that_is_proven() -> None:
    table = new_table(A, capacity_bytes=8)
    table.record(A, chain("abcdefgh"), now=1)
    guess(table, A, chain("ab1234"))
    evict(table, 2)
    assert table.match(chain("abcdefgh")) == {A: 8}
    assert table.match(chain("ab1234")) == {A: 6}
    check_integrity(table)


def test_guesses_take_half_of_a_cache_and_the_newest_goes_first() -> None:
    table = new_table(A, capacity_bytes=8)
    for text, fits in (("abc", 3), ("xyz", 1), ("uvw", 0), ("abcd", 3)):
        guess(table, A, chain(text))
        assert table.match(chain(text)).get(A, 0) == fits, text
    check_integrity(table)


def test_a_chain_that_is_longer_than_the_cache_is_not_written() -> None:
    table = new_table(A, capacity_bytes=4)
    assert guess(table, A, chain("abcde")) is None
    assert table.match(chain("abcde")) == {}


def test_a_guess_renews_nothing_until_it_proves_true() -> None:
    for proves, oldest in ((False, "a"), (True, "x")):
        table = new_table(A, capacity_bytes=4)
        table.record(A, chain("ab"), now=1)
        table.record(A, chain("xy"), now=2)
        guessed = guess(table, A, chain("ab"))
        if proves:
            prove(table, A, chain("ab"), guessed, now=3)
        else:
            drop(table, guessed)
        table.record(A, chain("uv"), now=4)
        evict(table, 5)
        assert A not in table.match(chain(oldest))
        check_integrity(table)


def test_what_open_guess_covers_stays_when_it_is_evicted_and_goes_with_it() -> None:
    table = new_table(A, capacity_bytes=4)
    table.record(A, chain("abc"), now=1)
    guessed = guess(table, A, chain("abcd"))
    table.record(A, chain("wxyz"), now=2)
    evict(table, 3)
    assert table.mirrors[A].entries == 4
    assert table.match(chain("abcd")) == {A: 4}
    check_integrity(table)
    drop(table, guessed)
    assert table.match(chain("abcd")) == {}
    assert table.match(chain("wxyz")) == {A: 4}
    check_integrity(table)


def test_two_guesses_share_chunks_and_each_keeps_its_own() -> None:
    for first in (0, 1):
        table = new_table(A, B)
        guesses = [guess(table, A, chain("abcd")), guess(table, A, chain("abxy"))]
        table.record(B, chain("abc"), now=1)
        drop(table, guesses[first])
        check_integrity(table)
        assert table.match(chain("abcd"))[A] == (2, 4)[first]
        assert table.match(chain("abxy"))[A] == (4, 2)[first]
        drop(table, guesses[1 - first])
        check_integrity(table)
        assert table.match(chain("abcd")) == {B: 3}


def test_a_guess_is_void_after_a_restart_or_a_departure() -> None:
    table = new_table(A)
    table.record(A, chain("a"), now=1)
    before_restart = guess(table, A, chain("abc"))
    clear_endpoint(table, A)
    assert table.match(chain("abc")) == {}
    before_departure = guess(table, A, chain("abc"))
    drop(table, before_restart)
    assert table.match(chain("abc")) == {A: 3}
    drop_endpoint(table, A)
    add_endpoint(table, A, capacity_bytes=10)
    guess(table, A, chain("abc"))
    drop(table, before_departure)
    assert table.match(chain("abc")) == {A: 3}
    check_integrity(table)


def test_chunks_that_a_server_reports_stay_when_their_guess_is_dropped() -> None:
    table = new_table(A)
    guessed = guess(table, A, chain("abcd"))
    assert credit(table, A, chain("abxy"), now=2)
    drop(table, guessed)
    assert table.match(chain("abcd")) == {A: 2}
    assert table.match(chain("abxy")) == {A: 4}
    check_integrity(table)
