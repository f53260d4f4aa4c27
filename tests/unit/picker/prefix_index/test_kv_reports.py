"""What the fields of a server's report mean to the table that takes it in."""

from __future__ import annotations

import pytest

from epp.config.prefix import Tiers
from epp.picker.prefix_index.kv_reports import UNDER_WAY_S, LookupReport, ServerReport, Tier
from epp.picker.prefix_index.reported import ReportedCaches
from tests.unit.picker.prefix_index.tables import SCHEDULE, A, chain, new_table


def test_a_tier_is_the_index_of_its_share_in_the_policy() -> None:
    tiers = Tiers(cpu_share=0.8, storage_share=0.3)
    assert [tiers.shares[tier] for tier in (Tier.GPU, Tier.CPU, Tier.STORAGE)] == [1.0, 0.8, 0.3]
    assert len(tiers.shares) == len(Tier)


def test_tiers_are_ordered_from_the_fastest() -> None:
    assert min([Tier.STORAGE, Tier.GPU, Tier.CPU]) is Tier.GPU
    assert sorted(Tier) == [Tier.GPU, Tier.CPU, Tier.STORAGE]


def test_a_chunk_that_no_report_names_is_in_the_first_tier() -> None:
    reported = ReportedCaches()
    reported.take_in([ServerReport(server=A, live=True)], new_table(A))
    assert reported.worth_bytes(A, chain("abc"), schedule=SCHEDULE, shares=(1.0, 0.0, 0.0)) == 3


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
