"""Defines the state of the picker as people and Prometheus see it: plain values, made again for each report.

`state_report` fills `EndpointStatus`, and `app` fills `PickerStatus`. The admin pages show them, and
Prometheus reads the fields that declare a metric. None in any field means that the server does not state the
value, or that no fresh value is known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from epp.base.metric import counter, gauge
from epp.base.types import EndpointName
from epp.picker.endpoints.marks import Verdict
from epp.picker.flow.accounts import FlowStatus
from epp.picker.prefix_index.reported import ExactStatus
from epp.sources.sharing_status import SharingStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """The current state of one endpoint."""

    name: EndpointName
    address: str
    model: str = ""
    pool: str = ""
    """The InferencePool of the endpoint. Empty: endpoints come from a file."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that the picker believes to be loaded there."""
    ready: bool = gauge("epp_endpoint_ready", "1 while requests may go to the endpoint.", default=True)
    in_flight: int = gauge(
        "epp_endpoint_in_flight", "Requests that this picker has in flight on the endpoint."
    )
    peers_in_flight: int = gauge(
        "epp_endpoint_peers_in_flight",
        "Requests that other pickers report in flight on the endpoint.",
    )
    backlog_tokens: float = gauge(
        "epp_endpoint_backlog_tokens",
        "Estimated prompt tokens that were sent to the endpoint and are not computed yet.",
    )
    computed_tokens_per_s: float = 0.0
    """Prompt tokens per second that the endpoint computed recently."""
    prefill_tokens_per_s: float | None = None
    """Prefill rate, learned from the endpoint's own timing metrics."""
    running: int | None = None
    waiting: int | None = gauge(
        "epp_endpoint_waiting", "Requests waiting in the queue of the endpoint, from its metrics."
    )
    kv_usage: float | None = gauge(
        "epp_endpoint_kv_usage_ratio", "Share of the KV cache in use on the endpoint, from its metrics."
    )
    prefix_queries_tokens: float | None = counter(
        "epp_endpoint_prefix_queries_tokens_total",
        "Prompt tokens that the server looked up in its prefix cache, from its metrics.",
    )
    prefix_hits_tokens: float | None = counter(
        "epp_endpoint_prefix_hits_tokens_total",
        "Prompt tokens that the server found in its prefix cache, from its metrics. Divided by "
        "epp_endpoint_prefix_queries_tokens_total this is the real hit rate. The predicted hit rate is "
        "epp_matched_tokens_total / epp_prompt_tokens_total.",
    )
    predicted_tokens: int = 0
    """Prompt tokens sent to the endpoint that the picker expected in its cache."""
    capacity_tokens: int | None = gauge(
        "epp_endpoint_capacity_tokens", "Size of the KV cache of the endpoint, from its metrics."
    )
    bytes_per_token: float | None = None
    table_entries: int = 0
    table_bytes: int = 0
    """Bytes of prompt text that the picker expects in the cache of the endpoint."""
    table_capacity_bytes: int = 0
    """Upper bound of `table_bytes`."""
    table_evictions: int = counter(
        "epp_table_evictions_total", "Table entries of the endpoint that were evicted."
    )
    scrape_age_s: float | None = gauge(
        "epp_endpoint_scrape_age_seconds",
        "Age of the last successful scrape of the endpoint. The series is absent before the first "
        "successful scrape.",
    )
    scrape_ok: bool = gauge("epp_endpoint_scrape_ok", "1 if the last scrape of the endpoint succeeded.")
    scrape_error: str = ""
    failure_share: float = gauge(
        "epp_endpoint_failure_share",
        "Share of the endpoint's recent answers that failed, as a moving average. Failures are 5xx, 429, "
        "connections that broke before the answer, and answers that broke off midway. The share is 1 for "
        "an endpoint whose requests hang.",
    )
    ejected: str = ""
    """Why the endpoint gets only trial requests. Empty: it is not ejected."""
    is_ejected: bool = gauge(
        "epp_endpoint_ejected",
        "1 while the endpoint gets only trial requests, because its answers fail or break off, or its "
        "requests get no answer.",
    )
    is_left_out: bool = gauge(
        "epp_endpoint_left_out", "The former name of epp_endpoint_ejected. It goes in 0.3.0."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerStatus:
    """The current state of the whole picker."""

    endpoints: tuple[EndpointStatus, ...] = ()
    table_entries: int = gauge("epp_table_size_entries", "Entries of the prefix table for all endpoints.")
    """A chunk that several endpoints hold counts once for each of them."""
    policy: str = ""
    rule: str = ""
    policy_info: Mapping[tuple[str, str], int] = gauge(
        "epp_policy_info",
        "Always 1. The labels name the policy and the rule in use.",
        "policy",
        "rule",
    )
    draining: bool = gauge("epp_draining", "1 while the picker drains after SIGTERM.")
    without_model_list: int = gauge(
        "epp_endpoints_without_model_list",
        "Endpoints whose list of models (`/v1/models`) the picker has not read yet. While there are any, "
        "the picker refuses no model as unknown (docs/models.md).",
    )
    held_body_bytes: int = gauge(
        "epp_held_body_bytes",
        "Bytes of unfinished request bodies that this worker holds. `streams.maxHeldBodyBytes` is the "
        "upper bound.",
    )
    overload_ratio: float = gauge(
        "epp_overload_ratio",
        "Share of new requests that the picker routes by load without reading them, because the picker "
        "itself is overloaded.",
    )
    goal_s: float = 2.0
    """Wait at which a pool counts as saturated, by the policy."""
    flow: Sequence[FlowStatus] = ()
    """The requests that flow control holds, by base model. Empty where flow control is off."""
    unserved: Sequence[str] = ()
    """Models for which requests wait until a first server is ready."""
    source_failures: Mapping[str, int] = counter(
        "epp_source_failures_total",
        "Unexpected failures of the picker's background loops, by source: scrape, models, file, "
        "kubernetes, sharing, exact, probes, explain, page, housekeeping, readiness. After each failure the "
        "loop is started again after a pause. The log says why it failed.",
        "source",
    )
    probes: Mapping[Verdict, int] = counter(
        "epp_probes_total",
        "Requests of one token that the picker itself sent to servers whose answers had failed, by "
        "verdict: well, ill, refused (3xx, 4xx), unclear (no connection, or too long an answer).",
        "verdict",
    )
    log_lines_left_out: Mapping[str, int] = counter(
        "epp_log_lines_left_out_total",
        "Log lines that were not written, by reason: dropped (standard error was not read fast enough), "
        "repeated (one place in the code logged more than 100 lines in 10 s).",
        "reason",
    )
    sharing: SharingStatus | None = None
    """None: this picker shares with no other picker."""
    exact: ExactStatus | None = None
    """None: the table is approximate."""


StatusSource = Callable[[], PickerStatus]
