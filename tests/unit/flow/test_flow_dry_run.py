"""Flow control of a policy in dry run. No request waits for it, and it reports what it would have done."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from epp.config.flow import Flow
from epp.config.policy import DEFAULT_POLICY, PolicySpec
from epp.decision import PickRequest
from epp.extproc.asking import read_head, request_names
from epp.extproc.header_names import TTFT_MS
from epp.picker.events import Pick
from epp.picker.gate import Claim, Gate
from epp.types import ApiKind, InferenceRequest
from tests.unit.extproc.stream_bench import Bench


def trying(**flow: Any) -> tuple[Bench, Gate]:
    """One picker whose policy holds nothing, and another policy in dry run."""
    bench = Bench()
    bench.picker.set_dry_run(
        replace(DEFAULT_POLICY, spec=PolicySpec(flow=Flow(mode="Hold", headroom_seconds=0.1, **flow)))
    )
    return bench, Gate(bench.picker)


def offer(gate: Gate, number: int, claim: Claim | None = None) -> str:
    """Offer a request, which gets its pick at once. Return what the policy in dry run would have done."""
    pick = gate.offer(
        long_request(number), claim or Claim(), _never, size_bytes=10, longest_s=float("inf"), now=0.0
    )
    assert isinstance(pick, Pick)
    assert gate.waiting == 0
    assert pick.decision.dry_run is not None
    return pick.decision.dry_run.flow


def long_request(number: int) -> PickRequest:
    prompt = f"question {number} ".encode() * 300
    inference = InferenceRequest(kind=ApiKind.COMPLETIONS, model="m", prompt=prompt)
    return PickRequest(request_id=f"r{number}", inference=inference)


def _never(*_: object) -> None:
    raise AssertionError("no request waits")


def test_requests_that_would_have_waited_or_been_refused_are_reported_and_counted() -> None:
    bench, gate = trying(deadline_seconds=2)
    fates = [offer(gate, n) for n in range(200)]
    assert fates[0] == "go"
    assert {"wait", "flow_deadline"} <= set(fates)
    assert bench.picker.dry_run is not None
    assert bench.picker.dry_run.flow.total() == 200
    bench.picker.set_dry_run(None)
    assert not gate.on


def test_a_policy_in_dry_run_that_holds_nothing_costs_nothing() -> None:
    bench = Bench()
    bench.picker.set_dry_run(DEFAULT_POLICY)
    assert not Gate(bench.picker).on


def test_the_headers_that_the_tried_policy_reads_are_read() -> None:
    picker, headers = Bench().picker, [(TTFT_MS, "1500")]
    spec, read = picker.policy.spec, picker.flow_read
    assert TTFT_MS not in request_names(spec, flow=read)
    assert read_head(headers, spec, flow=read).claim.ttft_s is None
    picker.set_dry_run(replace(DEFAULT_POLICY, spec=PolicySpec(flow=Flow(mode="Hold"))))
    assert TTFT_MS in request_names(spec, flow=picker.flow_read)
    assert read_head(headers, spec, flow=picker.flow_read).claim.ttft_s == 1.5
    picker.set_dry_run(None)
    assert picker.flow_read is None


def test_a_claim_that_the_policy_does_not_trust_does_not_reach_a_server() -> None:
    names = ("x-llm-d-inference-objective", "x-gateway-inference-objective", TTFT_MS, "who")
    headers = [(name, "1") for name in names]

    def removed(flow: Flow, *, tried: Flow | None = None) -> set[str]:
        picker = Bench(flow=flow).picker
        if tried is not None:
            picker.set_dry_run(replace(DEFAULT_POLICY, spec=PolicySpec(flow=tried)))
        spec, read = picker.policy.spec, picker.flow_read
        assert tried is not None or request_names(spec, flow=read).issuperset(names) == (flow.mode == "Hold")
        return {*read_head(headers, spec, flow=read).reserved}

    nobody = Flow(mode="Hold", claims=(), tenant_header="who")
    assert removed(nobody) == {*names[:3]}, (
        "a tenant's name may be a secret, such as the value of authorization"
    )
    assert removed(Flow(mode="Hold", claims=("Objective",), tenant_header="who")) == {TTFT_MS}
    assert removed(Flow(mode="Hold", tenant_header="who")) == set()
    assert removed(Flow(), tried=nobody) == set()  # a policy that is only tried changes no request
