"""The servers' own reports correct the table: chains that a server holds or lacks."""

from collections.abc import Mapping

import pytest

from epp.base.types import EndpointName
from epp.picker.prefix_index.reported import (
    UNDER_WAY_S,
    KvReport,
    LookupReport,
    LossReport,
    correct,
)
from epp.picker.prefix_index.table import PrefixTable
from tests.invariants.table import check_table
from tests.unit.picker.prefix_index.tables import A, B, chain, new_table


def report(table: PrefixTable, *reports: KvReport) -> dict[str, int]:
    counts = {"credited": 0, "forgotten": 0}
    correct(table, reports, counts)
    check_table(table)
    return counts


def lookup(
    text: str,
    held: Mapping[EndpointName, int],
    *,
    sure: frozenset[EndpointName] = frozenset({A, B}),
    at: float = 100.0,
    from_chunk: int = 0,
) -> LookupReport:
    return LookupReport(chain=chain(text), held=held, sure=sure, from_chunk=from_chunk, at=at)


class TestLosses:
    def test_a_chunk_that_a_server_lacks_is_removed_with_all_chunks_after_it(self) -> None:
        table = new_table(A, B)
        for name in (A, B):
            table.record(name, chain("abcd"), now=1)
            table.record(name, chain("abxy"), now=2)
        reported = report(table, LossReport(server=A, chain=chain("ab"), at=3.0))
        assert table.match(chain("abcd")) == {A: 1, B: 4}
        assert table.match(chain("abxy")) == {A: 1, B: 4}
        assert reported == {"credited": 0, "forgotten": 5}

    def test_a_chunk_that_was_used_after_the_report_stays(self) -> None:
        table = new_table(A)
        table.record(A, chain("abcd"), now=2)
        reported = report(table, LossReport(server=A, chain=chain("ab"), at=1.0))
        assert table.match(chain("abcd")) == {A: 4}
        assert reported["forgotten"] == 0


class TestLookups:
    def test_each_server_is_credited_with_held_chunks_and_loses_missing_chunks(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abcd"), now=1)
        reported = report(table, lookup("abcd", {A: 2, B: 3}))
        assert table.match(chain("abcd")) == {A: 2, B: 3}
        assert reported == {"credited": 1, "forgotten": 2}

    @pytest.mark.parametrize(
        ("found", "held"),
        [(lookup("abcd", {}, sure=frozenset({B})), 4), (lookup("abcd", {}, from_chunk=2), 2)],
        ids=["the server may hold more", "the first chunks are no whole block"],
    )
    def test_what_a_lookup_cannot_tell_is_left_alone(self, found: LookupReport, held: int) -> None:
        table = new_table(A)
        table.record(A, chain("abcd"), now=1)
        report(table, found)
        assert table.match(chain("abcd")) == {A: held}


@pytest.mark.parametrize(("after_s", "held"), [(UNDER_WAY_S - 0.1, {A: 4}), (UNDER_WAY_S, {})])
def test_a_prompt_that_a_server_got_a_moment_ago_may_still_be_missing(
    after_s: float, held: dict[object, int]
) -> None:
    table = new_table(A)
    table.record(A, chain("abcd"), now=10.0)
    report(table, lookup("abcd", {}, at=10.0 + after_s))
    assert table.match(chain("abcd")) == held
