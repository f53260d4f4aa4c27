"""The state of exact mode as people and Prometheus see it. `state_report` fills in the last two fields, and
`kvevents` all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from epp.base.metric import counter, gauge
from epp.base.types import EndpointName

ModelState = Literal["waiting", "checking", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactModelStatus:
    """The state of exact mode for the prompts of one base model."""

    state: ModelState = gauge(
        "epp_exact_model",
        "Always 1. The label gives the state of exact mode for a base model: waiting (for the first "
        "event), checking (whether routed prompts appear in the events), on or off. After an unexpected "
        "error exact mode is off for every model until it starts again; the log has the error.",
        "state",
    )
    reason: str
    prompts: Mapping[str, int] = counter(
        "epp_exact_prompts_total",
        "Routed prompts, by what exact mode did with them. mapped: the prompt was mapped to blocks. "
        "matched or missed: its blocks did or did not appear on the server. Any other value says why the "
        "prompt was not mapped: adapter, arguments, content, error, template, tokenizer, waiting, model, "
        "off.",
        "result",
    )
    algorithm: str = ""
    """How the servers name blocks. Empty: this is not known yet."""
    block_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactServerStatus:
    """What exact mode knows of one server."""

    state: str = gauge(
        "epp_exact_endpoint",
        "Always 1. The label says what the picker knows of the cache of the endpoint: following "
        "(everything), partly (what was stored since the picker connected) or off.",
        "state",
    )
    reason: str
    blocks: int = gauge("epp_exact_endpoint_blocks", "Blocks that the endpoint holds, by its KV events.")
    events: int = counter("epp_exact_endpoint_events_total", "KV events received from the endpoint.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactStatus:
    """What the KV events of the servers say. All but blocks are totals since the picker
    started.
    """

    models: Mapping[str, ExactModelStatus]
    servers: Mapping[EndpointName, ExactServerStatus]
    gaps: Mapping[str, int] = counter(
        "epp_exact_gaps_total",
        "How often messages of a server were missing. found: all gaps. lost: gaps that the replay did not "
        "fill.",
        "kind",
    )
    malformed: int = counter("epp_exact_malformed_total", "Messages that could not be read as KV events.")
    dropped_prompts: int = counter(
        "epp_exact_dropped_prompts_total",
        "Routed prompts that exact mode skipped because too many were waiting.",
        default=0,
    )
    corrections: Mapping[str, int] = counter(
        "epp_exact_corrections_total",
        "Corrections of the prefix table by KV events. credited: chains added for a server that holds "
        "them. forgotten: entries removed for a server that does not hold them.",
        "kind",
        default_factory=dict,
    )
