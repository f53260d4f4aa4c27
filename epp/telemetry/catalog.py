"""Every metric of the picker, by name: the one list that `metrics` registers and `reference` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

_FINE_SECONDS: Final = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
    *(0.01, 0.02, 0.05, 0.1, 0.25, 1.0),
)
_TTFT_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric as Prometheus sees it; counters end in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REQUESTS: Final = Spec(
    "epp_requests_total",
    "counter",
    "Requests that have finished, by outcome: ended, aborted (the client left), failed, detached (the picker let the stream "
    "go early) or refused. A refused request has no API kind.",
    ("outcome", "kind"),
)
IN_FLIGHT: Final = Spec(
    "epp_in_flight", "gauge", "Requests that have an endpoint and whose streams are still open."
)
PICK_SECONDS: Final = Spec(
    "epp_pick_seconds",
    "histogram",
    "Time to choose an endpoint, from the parsed request to the answer.",
    buckets=_FINE_SECONDS,
)
PARSE_SECONDS: Final = Spec(
    "epp_parse_seconds", "histogram", "Time to read a request body.", buckets=_FINE_SECONDS
)
PARSED_BYTES: Final = Spec("epp_parsed_bytes_total", "counter", "Bytes of request bodies read.")
FLOW_WAITED: Final = Spec(
    "epp_flow_waited_seconds",
    "histogram",
    "How long requests were held that flow control held and then let go.",
    buckets=_TTFT_SECONDS,
)
UNREAD_BODIES: Final = Spec(
    "epp_unread_bodies_total",
    "counter",
    "Requests that were routed by load because their body was not read, by reason: costly_body (reading it would hold up all other "
    "requests), encoded_body (compressed), partial_body and body_not_seen (the data plane did not hand over all of it), "
    "no_room (bodies that wait for the rest of them are over streams.maxHeldBodyBytes).",
    ("reason",),
)
PICKS: Final = Spec(
    "epp_picks_total",
    "counter",
    "Picks, by the first endpoint of the answer and the reason of the choice. Counting restarts when an endpoint leaves and "
    "comes back.",
    ("endpoint", "reason"),
)
PREFILL_PICKS: Final = Spec(
    "epp_prefill_picks_total",
    "counter",
    "Picks in which another endpoint than the chosen one was asked to compute the prompt, by that prefill endpoint. Counting "
    "restarts when an endpoint leaves and comes back.",
    ("endpoint",),
)
PREFILL_TOKENS: Final = Spec(
    "epp_prefill_tokens_total",
    "counter",
    "Prompt tokens that prefill endpoints were asked to compute in those picks.",
    ("endpoint",),
)
ANSWERS: Final = Spec(
    "epp_answers_total",
    "counter",
    "Answers that have begun, by the endpoint that served and the class of the status: 2xx, 3xx, 4xx, 404, 429 or 5xx. Counting "
    "restarts when an endpoint leaves and comes back.",
    ("endpoint", "class"),
)
HEADERS_SECONDS: Final = Spec(
    "epp_time_to_headers_seconds_total",
    "counter",
    "Seconds from the pick to the headers of the answer, added up over the answers of an endpoint. Divide by epp_answers_total for "
    "the mean.",
    ("endpoint",),
)
PROMPT_TOKENS: Final = Spec(
    "epp_prompt_tokens_total", "counter", "Estimated prompt tokens of all routed requests."
)
MATCHED_TOKENS: Final = Spec(
    "epp_matched_tokens_total",
    "counter",
    "Prompt tokens that the picker expected in the prefix cache of the chosen endpoint, out of epp_prompt_tokens_total.",
)
SAMPLED_PREDICTED: Final = Spec(
    "epp_sampled_predicted_tokens_total",
    "counter",
    "Tokens that the picker expected in the cache, for sampled answers in which the server reported its cached tokens.",
)
SAMPLED_CACHED: Final = Spec(
    "epp_sampled_cached_tokens_total",
    "counter",
    "Tokens that the servers reported as cached, for the same answers. Divide by epp_sampled_predicted_tokens_total to see "
    "how good the prediction is.",
)
SAMPLED_TRUE: Final = Spec(
    "epp_sampled_true_tokens_total",
    "counter",
    "For each sampled answer the smaller of the predicted and the reported tokens. Divided by "
    "epp_sampled_predicted_tokens_total this is the precision of the prediction, divided by "
    "epp_sampled_cached_tokens_total its recall.",
)
SAMPLED_TTFT: Final = Spec(
    "epp_sampled_ttft_seconds",
    "histogram",
    "Time from the pick to the first token, for sampled streamed answers.",
    buckets=_TTFT_SECONDS,
)
REFUSED: Final = Spec(
    "epp_refused_total", "counter", "Requests that the picker answered itself with an error.", ("reason",)
)
MISMATCHES: Final = Spec(
    "epp_served_mismatch_total",
    "counter",
    "Answers from another endpoint than the first choice, because the data plane retried or passed the first choice by.",
)
PROTOCOL_ERRORS: Final = Spec(
    "epp_protocol_errors_total",
    "counter",
    "Messages from the data plane that break the protocol.",
    ("reason",),
)
RELOADS: Final = Spec(
    "epp_reloads_total",
    "counter",
    "Changes of watched files, by file and by result (accepted or refused).",
    ("source", "result"),
)
RELOAD_OK: Final = Spec(
    "epp_reload_ok",
    "gauge",
    "1 while the newest content of a watched file is in use, 0 while the picker refuses this content.",
    ("source",),
)
DRY_RUN: Final = Spec(
    "epp_dry_run_picks_total",
    "counter",
    "Picks that a policy in dry run scored too, by whether this policy would have picked the same endpoint.",
    ("policy", "agrees"),
)
FOLLOWED: Final = Spec(
    "epp_kubernetes_followed",
    "gauge",
    "1 while the picker can watch this resource on the API server, 0 while it works with the last known state.",
    ("resource",),
)
POLICIES: Final = Spec(
    "epp_kubernetes_policies",
    "gauge",
    "PrefixRoutingPolicies for the pool, by state (accepted or refused).",
    ("state",),
)
LEASE_HELD: Final = Spec(
    "epp_kubernetes_lease_held",
    "gauge",
    "1 in the process that holds the Lease and writes the status of policies.",
)
TASKS: Final = Spec(
    "epp_tasks",
    "gauge",
    "Tasks of the event loop: one for each open stream, scrape and connection, and a few more.",
)
LOOP_LAG: Final = Spec(
    "epp_loop_lag_seconds",
    "histogram",
    "How late the event loop runs what is due, looked at ten times a second. Requests wait this long before the picker reads them.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
EVENTS: Final = (
    *(
        REQUESTS,
        IN_FLIGHT,
        PICK_SECONDS,
        PARSE_SECONDS,
        PARSED_BYTES,
        FLOW_WAITED,
        UNREAD_BODIES,
        PICKS,
        PREFILL_PICKS,
        PREFILL_TOKENS,
        ANSWERS,
        HEADERS_SECONDS,
        PROMPT_TOKENS,
        MATCHED_TOKENS,
    ),
    *(
        SAMPLED_PREDICTED,
        SAMPLED_CACHED,
        SAMPLED_TRUE,
        SAMPLED_TTFT,
        REFUSED,
        MISMATCHES,
        PROTOCOL_ERRORS,
        RELOADS,
        RELOAD_OK,
    ),
    *(DRY_RUN, FOLLOWED, POLICIES, LEASE_HELD, LOOP_LAG, TASKS),
)
"""Metrics that are counted when something happens."""

POLICY: Final = Spec(
    "epp_policy_info",
    "gauge",
    "Always 1. The labels name the policy and the rule in use.",
    ("policy", "rule"),
)
DRAINING: Final = Spec("epp_draining", "gauge", "1 while the picker drains after SIGTERM.")
HELD_BODIES: Final = Spec(
    "epp_held_body_bytes",
    "gauge",
    "Bytes of request bodies that wait for the rest of them, in one worker. `streams.maxHeldBodyBytes` bounds it.",
)
OVERLOAD: Final = Spec(
    "epp_overload_ratio",
    "gauge",
    "Share of new requests that are routed by load without reading them, because the picker itself has too much to do.",
)
FLOW_WAITING: Final = Spec(
    "epp_flow_waiting_requests",
    "gauge",
    "Requests that flow control holds, by base model and priority.",
    ("model", "priority"),
)
FLOW_WAITING_TOKENS: Final = Spec(
    "epp_flow_waiting_tokens",
    "gauge",
    "Prompt tokens to compute of the requests that flow control holds.",
    ("model", "priority"),
)
FLOW_LET_GO_TOKENS: Final = Spec(
    "epp_flow_let_go_tokens_total",
    "counter",
    "Prompt tokens to compute of the requests that flow control let go, by base model and tenant. The first 32 tenants have a label of their "
    "own, the others share `(others)`.",
    ("model", "tenant"),
)
FLOW_DEMOTED: Final = Spec(
    "epp_flow_demoted_requests_total",
    "counter",
    "Requests that flow control put last, since they could not meet their deadline.",
    ("model",),
)
FLOW_OLDEST: Final = Spec(
    "epp_flow_oldest_seconds",
    "gauge",
    "How long the oldest of the requests that flow control holds has waited.",
    ("model",),
)
FLOW_SATURATION: Final = Spec(
    "epp_flow_saturation",
    "gauge",
    "0: the servers of the base model are idle. 1: a new request waits as long as flow.goalSeconds says. Above: they are too few. Only "
    "while flow control is on.",
    ("model",),
)
POOL_SERVERS: Final = Spec(
    "epp_pool_servers", "gauge", "Servers of the base model that requests may go to.", ("model",)
)
POOL_UNDONE: Final = Spec(
    "epp_pool_undone_seconds",
    "gauge",
    "Prompt tokens that are not computed yet, divided by what all ready servers of the base model compute in a second. servers: tokens sent to "
    "servers; every replica tells it of the whole pool. queue: tokens of the requests that flow control holds in this replica.",
    ("model", "where"),
)
POOL_SATURATION: Final = Spec(
    "epp_pool_saturation",
    "gauge",
    "The larger of two: epp_pool_undone_seconds divided by flow.goalSeconds, and the mean share of the KV caches that running requests use. At 1 "
    "the servers of the base model are too few. For autoscalers; flow control need not be on.",
    ("model",),
)
LOG_LINES_LEFT_OUT: Final = Spec(
    "epp_log_lines_left_out_total",
    "counter",
    "Log lines that were not written, by reason: dropped (nobody read standard error fast enough), repeated (one place in the code logged "
    "more than 100 lines in 10 s; one line says how many).",
    ("reason",),
)
RECORDED: Final = Spec(
    "epp_recorded_requests_total",
    "counter",
    "Requests of which the recording should have a line, by result: written, dropped (the disk was too slow), failed (the disk refused "
    "it). Only with `recording`.",
    ("result",),
)
SOURCE_FAILURES: Final = Spec(
    "epp_source_failures_total",
    "counter",
    "Unexpected failures of the loops that read news, by source: scrape, file, kubernetes, sharing, exact, explain, page, recording, housekeeping, readiness. "
    "The loop was started again after a pause. The log says why it failed.",
    ("source",),
)
TABLE_TOTAL: Final = Spec("epp_table_size_entries", "gauge", "Entries of the prefix table for all endpoints.")
READY: Final = Spec("epp_endpoint_ready", "gauge", "1 while requests may go to the endpoint.", ("endpoint",))
ENDPOINT_IN_FLIGHT: Final = Spec(
    "epp_endpoint_in_flight",
    "gauge",
    "Requests that this picker has in flight on the endpoint.",
    ("endpoint",),
)
BACKLOG: Final = Spec(
    "epp_endpoint_backlog_tokens",
    "gauge",
    "Estimated prompt tokens that were sent to the endpoint and are not computed yet.",
    ("endpoint",),
)
PREFILL_RATE: Final = Spec(
    "epp_endpoint_prefill_tokens_per_second",
    "gauge",
    "Prefill rate of the endpoint, learned from its own timing metrics.",
    ("endpoint",),
)
RUNNING: Final = Spec(
    "epp_endpoint_running", "gauge", "Requests running on the endpoint, from its metrics.", ("endpoint",)
)
WAITING: Final = Spec(
    "epp_endpoint_waiting",
    "gauge",
    "Requests waiting in the queue of the endpoint, from its metrics.",
    ("endpoint",),
)
KV_USAGE: Final = Spec(
    "epp_endpoint_kv_usage_ratio",
    "gauge",
    "Share of the KV cache in use on the endpoint, from its metrics.",
    ("endpoint",),
)
PREDICTED: Final = Spec(
    "epp_endpoint_predicted_tokens_total",
    "counter",
    "Prompt tokens sent to the endpoint that the picker expected in its cache. Compare with "
    "epp_endpoint_prefix_hits_tokens_total, which also counts requests of other pickers.",
    ("endpoint",),
)
CACHE_SIZE: Final = Spec(
    "epp_endpoint_cache_size_ratio",
    "gauge",
    "Cache size that the picker has learned, divided by the size that the metrics state or the policy assumes. Learned for "
    "each model.",
    ("endpoint",),
)
BYTES_PER_TOKEN: Final = Spec(
    "epp_endpoint_bytes_per_token",
    "gauge",
    "Bytes of prompt text for one token, learned for each model.",
    ("endpoint",),
)
CAPACITY: Final = Spec(
    "epp_endpoint_capacity_tokens",
    "gauge",
    "Size of the KV cache of the endpoint, from its metrics.",
    ("endpoint",),
)
SCRAPE_AGE: Final = Spec(
    "epp_endpoint_scrape_age_seconds",
    "gauge",
    "Age of the last successful scrape of the endpoint. Absent before the first one.",
    ("endpoint",),
)
SCRAPE_OK: Final = Spec(
    "epp_endpoint_scrape_ok", "gauge", "1 if the last scrape of the endpoint succeeded.", ("endpoint",)
)
PREFIX_QUERIES: Final = Spec(
    "epp_endpoint_prefix_queries_tokens_total",
    "counter",
    "Prompt tokens that the server looked up in its prefix cache, from its metrics.",
    ("endpoint",),
)
PREFIX_HITS: Final = Spec(
    "epp_endpoint_prefix_hits_tokens_total",
    "counter",
    "Prompt tokens that the server found in its prefix cache, from its metrics. Divided by "
    "epp_endpoint_prefix_queries_tokens_total this is the real hit rate; epp_matched_tokens_total / epp_prompt_tokens_total "
    "is the predicted one.",
    ("endpoint",),
)
TABLE_ENTRIES: Final = Spec(
    "epp_table_entries", "gauge", "Entries of the prefix table for the endpoint.", ("endpoint",)
)
TABLE_BYTES: Final = Spec(
    "epp_table_bytes",
    "gauge",
    "Bytes of prompt text that the picker expects in the cache of the endpoint.",
    ("endpoint",),
)
TABLE_CAPACITY: Final = Spec(
    "epp_table_capacity_bytes", "gauge", "Upper bound of epp_table_bytes.", ("endpoint",)
)
EVICTIONS: Final = Spec(
    "epp_table_evictions_total", "counter", "Table entries of the endpoint that were evicted.", ("endpoint",)
)
FAILURE_SHARE: Final = Spec(
    "epp_endpoint_failure_share",
    "gauge",
    "Share of the endpoint's recent answers that failed, by a moving average: 5xx, 429, and connections that broke before the "
    "answer. 1 for an endpoint whose requests hang.",
    ("endpoint",),
)
LEFT_OUT: Final = Spec(
    "epp_endpoint_left_out",
    "gauge",
    "1 while the endpoint gets only trial requests, because its answers fail or do not come.",
    ("endpoint",),
)
PEERS_IN_FLIGHT: Final = Spec(
    "epp_endpoint_peers_in_flight",
    "gauge",
    "Requests that other pickers report in flight on the endpoint.",
    ("endpoint",),
)
SHARING_CONNECTED: Final = Spec(
    "epp_sharing_connected",
    "gauge",
    "1 while the picker can send and receive over Redis or the workers' socket.",
)
SHARING_PEERS: Final = Spec("epp_sharing_peers", "gauge", "Other pickers that have sent something lately.")
SHARING_WAITING: Final = Spec(
    "epp_sharing_waiting_bytes",
    "gauge",
    "Bytes of events that wait to be sent to other pickers. sharing.outboxBytes is the upper bound.",
)
SHARING_SAID_BATCHES: Final = Spec(
    "epp_sharing_said_batches_total",
    "counter",
    "Batches sent to other pickers, including empty ones that only say that this picker is alive.",
)
SHARING_SAID_BYTES: Final = Spec(
    "epp_sharing_said_bytes_total", "counter", "Bytes of batches sent to other pickers."
)
SHARING_SAID_EVENTS: Final = Spec(
    "epp_sharing_said_events_total",
    "counter",
    "Events sent to other pickers. Each request sends two: one when it starts and one when it ends.",
)
SHARING_DROPPED: Final = Spec(
    "epp_sharing_dropped_events_total",
    "counter",
    "Events dropped because the outbox was full. Other pickers never see these events.",
)
SHARING_READ_BYTES: Final = Spec(
    "epp_sharing_read_bytes_total",
    "counter",
    "Bytes of batches read. From Redis a picker reads its own batches too.",
)
SHARING_HEARD: Final = Spec(
    "epp_sharing_heard_events_total", "counter", "Events of other pickers that were applied."
)
SHARING_SKIPPED: Final = Spec(
    "epp_sharing_skipped_events_total",
    "counter",
    "Events of other pickers that were ignored, by reason: unresolved (the event refers to a batch that was missed), stale "
    "(from before the endpoint lost its cache, or about an earlier process of the same name), stranger (this picker does not "
    "know the endpoint), excessive (the batch named more chunks than one may) and malformed (the batch could not be read, or was not "
    "signed with the pool's key).",
    ("reason",),
)
SHARING_GAPS: Final = Spec(
    "epp_sharing_gaps_total", "counter", "Times that batches of another picker were missing."
)
SHARING_ERRORS: Final = Spec(
    "epp_sharing_errors_total",
    "counter",
    "Failed calls to Redis or to the workers' socket; secret: the hash secret differs from another picker's.",
    ("reason",),
)
SHARING_TABLES: Final = Spec(
    "epp_sharing_tables_total",
    "counter",
    "Whole tables stored for new pickers, or loaded at start.",
    ("what",),
)
SHARING: Final = (
    *(SHARING_CONNECTED, SHARING_PEERS, SHARING_WAITING, SHARING_SAID_BATCHES, SHARING_SAID_BYTES),
    *(SHARING_SAID_EVENTS, SHARING_DROPPED, SHARING_READ_BYTES, SHARING_HEARD, SHARING_SKIPPED),
    *(SHARING_GAPS, SHARING_ERRORS, SHARING_TABLES),
)
"""Metrics that exist only where pickers share."""
TRACE_SPANS: Final = Spec(
    "epp_trace_spans_total",
    "counter",
    "Spans of sampled picks, by what became of them: sent, failed (the collector did not take them) or dropped (too many were waiting for "
    "the collector). Only with tracing.",
    ("result",),
)
EXACT_MODEL: Final = Spec(
    "epp_exact_model",
    "gauge",
    "Always 1. The label gives the state of exact mode for a base model: waiting (for the first event), checking (whether "
    "routed prompts appear in the events), on or off. After an unexpected error exact mode is off for every model until it starts again; the log has the error.",
    ("model", "state"),
)
EXACT_PROMPTS: Final = Spec(
    "epp_exact_prompts_total",
    "counter",
    "Routed prompts, by what exact mode did with them. mapped: the prompt was mapped to blocks. matched or missed: its blocks "
    "did or did not appear on the server. Any other value says why the prompt was not mapped: adapter, arguments, content, error, template, tokenizer, "
    "waiting, model, off.",
    ("model", "result"),
)
EXACT_DROPPED: Final = Spec(
    "epp_exact_dropped_prompts_total",
    "counter",
    "Routed prompts that exact mode skipped because too many were waiting.",
)
EXACT_ENDPOINT: Final = Spec(
    "epp_exact_endpoint",
    "gauge",
    "Always 1. The label says what the picker knows of the cache of the endpoint: following (everything), partly (what was stored "
    "since the picker connected) or off.",
    ("endpoint", "state"),
)
EXACT_BLOCKS: Final = Spec(
    "epp_exact_endpoint_blocks", "gauge", "Blocks that the endpoint holds, by its KV events.", ("endpoint",)
)
EXACT_CHUNKS: Final = Spec(
    "epp_exact_endpoint_chunks", "gauge", "Chunks of routed prompts that these blocks cover.", ("endpoint",)
)
EXACT_EVENTS: Final = Spec(
    "epp_exact_endpoint_events_total", "counter", "KV events received from the endpoint.", ("endpoint",)
)
EXACT_GAPS: Final = Spec(
    "epp_exact_gaps_total",
    "counter",
    "Times that messages of a server were missing. found: all gaps. lost: gaps that the replay did not fill.",
    ("kind",),
)
EXACT_MALFORMED: Final = Spec(
    "epp_exact_malformed_total", "counter", "Messages that could not be read as KV events."
)
EXACT_CORRECTIONS: Final = Spec(
    "epp_exact_corrections_total",
    "counter",
    "Corrections of the prefix table by KV events. credited: chains added for a server that holds them. forgotten: entries "
    "removed for a server that does not hold them.",
    ("kind",),
)
EXACT: Final = (
    *(EXACT_MODEL, EXACT_PROMPTS, EXACT_DROPPED, EXACT_ENDPOINT, EXACT_BLOCKS, EXACT_CHUNKS),
    *(EXACT_EVENTS, EXACT_GAPS, EXACT_MALFORMED, EXACT_CORRECTIONS),
)
"""Metrics that exist only with exact mode."""
STATE: Final = (
    *(
        POLICY,
        DRAINING,
        HELD_BODIES,
        OVERLOAD,
        FLOW_WAITING,
        FLOW_WAITING_TOKENS,
        FLOW_LET_GO_TOKENS,
        FLOW_DEMOTED,
        FLOW_OLDEST,
        FLOW_SATURATION,
        POOL_SERVERS,
        POOL_UNDONE,
        POOL_SATURATION,
        SOURCE_FAILURES,
        LOG_LINES_LEFT_OUT,
        RECORDED,
        TABLE_TOTAL,
        READY,
        ENDPOINT_IN_FLIGHT,
        BACKLOG,
        PREFILL_RATE,
        RUNNING,
        WAITING,
        KV_USAGE,
    ),
    *(
        PREFIX_QUERIES,
        PREFIX_HITS,
        PREDICTED,
        CAPACITY,
        CACHE_SIZE,
        BYTES_PER_TOKEN,
        SCRAPE_AGE,
        SCRAPE_OK,
        TABLE_ENTRIES,
        TABLE_BYTES,
        TABLE_CAPACITY,
        EVICTIONS,
        PEERS_IN_FLIGHT,
        FAILURE_SHARE,
        LEFT_OUT,
    ),
    TRACE_SPANS,
    *SHARING,
    *EXACT,
)
"""Metrics that are read from the state of the picker at each scrape by Prometheus."""
