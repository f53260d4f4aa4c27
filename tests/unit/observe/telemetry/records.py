"""Decisions and picks for tests of the pages that show them."""

from collections import Counter
from typing import Any

from epp.base.types import Address, ApiKind, EndpointName, InferenceRequest
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import PickerStatus
from epp.picker.decision import Candidate, Decision, Question
from epp.picker.events import Answered, Began, Ended, Phase, Pick
from epp.sources.sharing_status import SharingStatus

HERE = Address("10.0.0.1", 8000)
THERE = Address("fd00::2", 8000)
SHARING = SharingStatus(
    connected=True,
    peers=3,
    sent_events=6,
    applied_events=7,
    skipped=Counter(stale=2),
    errors=Counter(timeout=1),
)


def decision(
    request_id: str = "r1",
    *,
    chosen: str = "a",
    reason: str = "prefix",
    model: str = "base",
    adapter: str = "",
    prompt_tokens: int = 1000,
    matched_tokens: int = 600,
) -> Decision:
    candidates = tuple(
        Candidate(
            name=EndpointName(name),
            address=address,
            matched_tokens=matched_tokens if name == chosen else 0,
            uncached_tokens=prompt_tokens - matched_tokens,
            backlog_tokens=50,
            in_flight=2,
            waiting=0,
            kv_usage=0.5,
            prefill_tokens_per_s=8000.0,
            score_s=0.125,
            parts_s={"backlog": 0.025, "prefill": 0.1},
        )
        for name, address in ((chosen, HERE), ("other", THERE))
    )
    return Decision(
        request_id=request_id,
        at_unix_s=1_700_000_000.0,
        kind="chat",
        model=model,
        adapter=adapter,
        rule="least-cost",
        policy="default",
        prompt_tokens=prompt_tokens,
        prompt_chunks=16,
        matched_tokens=matched_tokens,
        reason=reason,
        chosen=EndpointName(chosen),
        destinations=(HERE, THERE),
        candidates=candidates,
    )


def pick(of: Decision | None = None) -> Pick:
    made = of or decision()
    nothing: Any = None
    return Pick(
        decision=made,
        destinations=made.destinations,
        sampled=False,
        phase=Phase.SENT,
        set_headers=(),
        state=nothing,
        streams=False,
        prompt=nothing,
        guess=nothing,
        sent=nothing,
        wait=nothing,
        asks=True,
    )


def began(of: Pick, *, trace: str = "", began_s: float | None = None) -> Began:
    question = Question(
        of.decision.request_id, InferenceRequest(kind=ApiKind.CHAT), trace=trace, began_s=began_s
    )
    return Began(0.0, of, question)


def answered(of: Pick, *, mismatch: bool = False) -> Answered:
    """Return the event that a picker sends, for a pick that the test made."""
    return Answered(0.0, of, mismatch)


def ended(of: Pick) -> Ended:
    return Ended(0.0, of)


def new_metrics() -> Metrics:
    """Return metrics that have counted nothing and keep no decisions."""
    return Metrics(decisions=DecisionRing(maxlen=0), state=PickerStatus)
