"""The tokens of each tenant, as people and other pickers get them."""

from __future__ import annotations

from epp.picker.flow.queues import OTHERS
from epp.picker.flow.shares import OTHERS_LABEL, Shares
from tests.unit.picker.flow.a_fleet import SECOND, gateway


def test_a_request_that_goes_is_charged_to_its_tenant() -> None:
    gate = gateway()
    gate.flow.take_charges()
    gate.offer(SECOND, priority=3, tenant="t", now=0.0)
    assert gate.flow.shares.tokens == {"t": 1000}
    assert gate.flow.take_charges() == {(3, "t"): 1000}


def test_the_first_32_tenants_are_counted_by_name_and_all_others_together() -> None:
    shares = Shares()
    for n in range(100):
        shares.add(0, f"t{n}", 10)
    shares.add(0, "t0", 5)
    assert len(shares.tokens) == 33
    assert (shares.tokens["t0"], shares.tokens[OTHERS_LABEL]) == (15, 680)


def test_tenants_in_a_shared_queue_count_with_those_without_a_name() -> None:
    shares = Shares()
    for tenant in (OTHERS, *(f"t{n}" for n in range(33))):
        shares.add(0, tenant, 10)
    assert len(shares.tokens) == 33
    assert (shares.tokens["t31"], shares.tokens[OTHERS_LABEL]) == (10, 20)
