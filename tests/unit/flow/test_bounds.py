"""How many requests may wait, and which of them is removed when too many do."""

from __future__ import annotations

from epp.flow.control import FlowControl
from epp.flow.queues import OTHERS
from epp.flow.settings import Bound, FlowSettings
from tests.unit.flow.a_fleet import AFleet, Ask, Gateway


def gateway(settings: FlowSettings) -> Gateway:
    fleet = AFleet(1)
    return Gateway(FlowControl(settings, fleet), fleet)


def test_a_request_that_is_demoted_into_the_full_queue_of_other_tenants_is_refused() -> None:
    settings = FlowSettings(ttft_s=2.0, when_late="demote", max_tenants=1, per_tenant=Bound(requests=1))
    gate = gateway(settings)
    gate.offer(Ask(1900), tenant="a", now=0.0)
    late = gate.offer(Ask(4000), tenant="b", now=0.0)  # of the demoted tenants, only b has its own queue
    moves = gate.offer(Ask(90), tenant="a", now=0.0)
    other = gate.offer(Ask(50), tenant="c", now=0.0)
    gate.fleet.busy_until = [10.0]  # other pickers have sent requests to the server
    gate.run(now=0.0, until=0.6)
    assert [(refused.item, refused.reason) for refused in gate.refused] == [(moves, "full")]
    assert [(item.tenant, item.late) for item in (late, moves, other)] == [
        ("b", True),
        (OTHERS, True),
        (OTHERS, True),
    ]
    gate.flow.check_integrity()
