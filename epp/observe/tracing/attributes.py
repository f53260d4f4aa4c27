"""Makes the attributes of a span about a decision: names and values, never a part of a prompt. Pure.
docs/tracing.md lists the names.

The GenAI and HTTP names are OpenTelemetry's semantic conventions. Other names begin with `prefix_gateway.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epp.base.errors import FlowRefusedError, PickError
from epp.base.types import ApiKind
from epp.picker.decision import Decision

Attributes = dict[str, str | int | float | bool]

_OPERATIONS: Final[Mapping[str, str]] = {
    ApiKind.CHAT: "chat",
    ApiKind.MESSAGES: "chat",
    ApiKind.RESPONSES: "chat",
    ApiKind.COMPLETIONS: "text_completion",
    ApiKind.EMBEDDINGS: "embeddings",
}


def attributes_of(decision: Decision) -> Attributes:
    """Return the attributes of a finished request. Unknown values are left out."""
    served = decision.served or decision.destinations[0]
    found: Attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(decision.kind, decision.kind),
        "server.address": served.host,
        "server.port": served.port,
        "prefix_gateway.request_id": decision.request_id,
        "prefix_gateway.rule": decision.rule,
        "prefix_gateway.policy": decision.policy,
        "prefix_gateway.reason": decision.reason,
        "prefix_gateway.endpoint": decision.chosen,
        "prefix_gateway.prompt_tokens": decision.prompt_tokens,
        "prefix_gateway.matched_tokens": decision.matched_tokens,
        "prefix_gateway.queue_seconds": decision.waited_s,
        "prefix_gateway.outcome": decision.outcome,
    }
    for name, value in (
        ("gen_ai.request.model", decision.model or None),
        ("gen_ai.usage.cache_read.input_tokens", decision.cached_tokens),
        ("http.response.status_code", decision.status),
        ("prefix_gateway.adapter", decision.adapter or None),
        ("prefix_gateway.unread", decision.unread or None),
        ("prefix_gateway.served_by", decision.served_by or None),
        ("prefix_gateway.headers_seconds", decision.headers_s),
        ("prefix_gateway.first_token_seconds", decision.ttft_s),
        ("prefix_gateway.prefill_endpoint", decision.prefill.name if decision.prefill else None),
        ("error.type", error_of(decision) or None),
    ):
        if value is not None:
            found[name] = value
    if decision.candidates:
        chosen = decision.candidates[0]
        tokens = chosen.backlog_tokens + chosen.uncached_tokens
        found["prefix_gateway.predicted_first_token_seconds"] = tokens / chosen.prefill_tokens_per_s
        found["prefix_gateway.score_seconds"] = chosen.score_s
    return found


def error_of(decision: Decision) -> str:
    """Return the reason why the request counts as an error. Empty: it is not an error. A request whose client
    left is not an error either.
    """
    if decision.status is not None and decision.status >= 500:
        return str(decision.status)
    return "failed" if decision.outcome == "failed" else ""


def attributes_of_refusal(request_id: str, error: PickError) -> Attributes:
    """Return the attributes of a request that the picker answered itself."""
    return {
        "http.response.status_code": error.status,
        "error.type": error.reason,
        "prefix_gateway.request_id": request_id,
        "prefix_gateway.reason": error.reason,
        "prefix_gateway.queue_seconds": error.waited_s if isinstance(error, FlowRefusedError) else 0.0,
        "prefix_gateway.outcome": "refused",
    }
