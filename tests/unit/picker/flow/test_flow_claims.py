"""What flow control reads of a request's headers, and which of these headers no server sees."""

from __future__ import annotations

import pytest

from epp.config.flow import Flow
from epp.protocol.asking import read_head, request_names
from epp.protocol.header_names import TTFT_MS
from tests.unit.protocol.stream_bench import Bench

NAMES = ("x-llm-d-inference-objective", "x-gateway-inference-objective", TTFT_MS, "who")


def removed(flow: Flow) -> set[str]:
    """Return the names of the headers that are removed, after a look at which of them are read."""
    picker = Bench(flow=flow).picker
    spec, read = picker.policy.spec, picker.flow_read
    assert request_names(spec, flow=read).issuperset(NAMES) == (flow.mode == "Hold")
    return {*read_head([(name, "1") for name in NAMES], spec, flow=read).reserved}


def test_a_claim_that_the_policy_does_not_trust_does_not_reach_a_server() -> None:
    """The name of a tenant is not removed: it may be a secret, such as the value of authorization."""
    assert removed(Flow(mode="Hold", claims=(), tenant_header="who")) == {*NAMES[:3]}
    assert removed(Flow(mode="Hold", claims=("Objective",), tenant_header="who")) == {TTFT_MS}
    assert removed(Flow(mode="Hold", tenant_header="who")) == set()
    assert removed(Flow(tenant_header="who")) == set(), "flow control is off"


@pytest.mark.parametrize("name", ["x" * 300, "é" * 5000])
def test_a_long_name_of_a_tenant_is_replaced_by_a_short_digest(name: str) -> None:
    picker = Bench(flow=Flow(mode="Hold", tenant_header="who")).picker
    claim = read_head([("who", name)], picker.policy.spec, flow=picker.flow_read).claim
    assert 0 < len(claim.tenant) <= 256
    assert not name.startswith(claim.tenant)
