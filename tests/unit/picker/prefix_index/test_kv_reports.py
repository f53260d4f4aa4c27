"""What the fields of a server's report mean to the table that takes it in."""

from __future__ import annotations

import pytest

from epp.picker.prefix_index.kv_reports import UNDER_WAY_S, LookupReport
from epp.picker.prefix_index.reported import ReportedCaches
from tests.unit.picker.prefix_index.tables import A, chain, new_table


@pytest.mark.parametrize(("after_s", "held"), [(UNDER_WAY_S - 0.1, {A: 4}), (UNDER_WAY_S, {})])
def test_a_prompt_that_a_server_got_a_moment_ago_may_still_be_missing(
    after_s: float, held: dict[object, int]
) -> None:
    table = new_table(A)
    table.record(A, chain("abcd"), now=10.0)
    lacking = LookupReport(
        chain=chain("abcd"), held={}, sure={A}, from_chunk=0, to_chunk=4, at=10.0 + after_s
    )
    ReportedCaches().take_in([lacking], table)
    assert table.match(chain("abcd")) == held
