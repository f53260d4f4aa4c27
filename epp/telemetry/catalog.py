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
    "Requests that are over: ended, aborted by the client, failed, detached (stream let go early), or refused. "
    "The API kind of a refused request is unknown.",
    ("outcome", "kind"),
)
IN_FLIGHT: Final = Spec("epp_in_flight", "gauge", "Requests picked whose streams are open.")
PICK_SECONDS: Final = Spec(
    "epp_pick_seconds",
    "histogram",
    "Time to choose an endpoint, from parsed request to answer.",
    buckets=_FINE_SECONDS,
)
PARSE_SECONDS: Final = Spec(
    "epp_parse_seconds", "histogram", "Time to read a request body.", buckets=_FINE_SECONDS
)
PARSED_BYTES: Final = Spec("epp_parsed_bytes_total", "counter", "Bytes of request bodies read.")
PICKS: Final = Spec(
    "epp_picks_total",
    "counter",
    "Picks by endpoint chosen first and by what decided. Starts anew when an endpoint leaves and returns.",
    ("endpoint", "reason"),
)
PROMPT_TOKENS: Final = Spec("epp_prompt_tokens_total", "counter", "Prompt tokens routed, estimated.")
MATCHED_TOKENS: Final = Spec(
    "epp_matched_tokens_total",
    "counter",
    "The part of epp_prompt_tokens_total that the chosen endpoint was believed to hold in its prefix cache.",
)
SAMPLED_PREDICTED: Final = Spec(
    "epp_sampled_predicted_tokens_total",
    "counter",
    "Matched tokens of sampled answers in which the server said how many it had cached.",
)
SAMPLED_CACHED: Final = Spec(
    "epp_sampled_cached_tokens_total",
    "counter",
    "Cached tokens by the servers' own account, for the same answers: over epp_sampled_predicted_tokens_total, the "
    "accuracy of the prediction.",
)
SAMPLED_TRUE: Final = Spec(
    "epp_sampled_true_tokens_total",
    "counter",
    "The part of both that agrees, answer by answer: over epp_sampled_predicted_tokens_total the precision of the "
    "prediction, over epp_sampled_cached_tokens_total its recall.",
)
SAMPLED_TTFT: Final = Spec(
    "epp_sampled_ttft_seconds",
    "histogram",
    "Time from pick to first token, of sampled streamed answers.",
    buckets=_TTFT_SECONDS,
)
REFUSED: Final = Spec("epp_refused_total", "counter", "Requests answered by the picker itself.", ("reason",))
MISMATCHES: Final = Spec(
    "epp_served_mismatch_total",
    "counter",
    "Answers that came from another endpoint than the first choice: retried or routed around by the data plane.",
)
PROTOCOL_ERRORS: Final = Spec(
    "epp_protocol_errors_total", "counter", "Messages of the data plane that made no sense.", ("reason",)
)
RELOADS: Final = Spec(
    "epp_reloads_total",
    "counter",
    "Changes of watched files, by file and whether they were accepted or refused.",
    ("source", "result"),
)
RELOAD_OK: Final = Spec(
    "epp_reload_ok",
    "gauge",
    "1 while the newest content of a watched file is in use, 0 while it is refused.",
    ("source",),
)
DRY_RUN: Final = Spec(
    "epp_dry_run_picks_total",
    "counter",
    "Picks that a policy in dry run has scored as well, and whether it would have picked the same endpoint.",
    ("policy", "agrees"),
)
FOLLOWED: Final = Spec(
    "epp_kubernetes_followed",
    "gauge",
    "1 while the API server lets the picker follow its pods, pool or policies; 0: what was known last is in use.",
    ("resource",),
)
POLICIES: Final = Spec(
    "epp_kubernetes_policies",
    "gauge",
    "PrefixRoutingPolicies for the pool, by whether they are accepted or refused.",
    ("state",),
)
LEASE_HELD: Final = Spec(
    "epp_kubernetes_lease_held",
    "gauge",
    "1 in the one process that writes the status of policies.",
)
EVENTS: Final = (
    *(REQUESTS, IN_FLIGHT, PICK_SECONDS, PARSE_SECONDS, PARSED_BYTES, PICKS, PROMPT_TOKENS, MATCHED_TOKENS),
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
    *(DRY_RUN, FOLLOWED, POLICIES, LEASE_HELD),
)
"""Counted as things happen."""

POLICY: Final = Spec("epp_policy_info", "gauge", "1; which policy and rule are in use.", ("policy", "rule"))
DRAINING: Final = Spec("epp_draining", "gauge", "1 from SIGTERM on.")
TABLE_TOTAL: Final = Spec(
    "epp_table_size_entries", "gauge", "Entries of the prefix table, over all endpoints."
)
READY: Final = Spec("epp_endpoint_ready", "gauge", "1 if the endpoint may be picked.", ("endpoint",))
ENDPOINT_IN_FLIGHT: Final = Spec(
    "epp_endpoint_in_flight", "gauge", "Requests that this picker has open there.", ("endpoint",)
)
BACKLOG: Final = Spec(
    "epp_endpoint_backlog_tokens",
    "gauge",
    "Prompt tokens sent there and not yet computed, estimated.",
    ("endpoint",),
)
PREFILL_RATE: Final = Spec(
    "epp_endpoint_prefill_tokens_per_second",
    "gauge",
    "Prefill rate, learned from the server's own times.",
    ("endpoint",),
)
RUNNING: Final = Spec("epp_endpoint_running", "gauge", "Requests running there, scraped.", ("endpoint",))
WAITING: Final = Spec("epp_endpoint_waiting", "gauge", "Requests waiting there, scraped.", ("endpoint",))
KV_USAGE: Final = Spec(
    "epp_endpoint_kv_usage_ratio", "gauge", "Share of its KV cache in use, scraped.", ("endpoint",)
)
PREDICTED: Final = Spec(
    "epp_endpoint_predicted_tokens_total",
    "counter",
    "Prompt tokens sent there in the belief that it held them: beside epp_endpoint_prefix_hits_tokens_total, which also "
    "counts what others sent, the error of the prediction.",
    ("endpoint",),
)
CACHE_SIZE: Final = Spec(
    "epp_endpoint_cache_size_ratio",
    "gauge",
    "What its cache is found to keep, over the size that its metrics state or the policy assumes; learned by model.",
    ("endpoint",),
)
BYTES_PER_TOKEN: Final = Spec(
    "epp_endpoint_bytes_per_token",
    "gauge",
    "Bytes of prompt text to a token, learned by model.",
    ("endpoint",),
)
CAPACITY: Final = Spec(
    "epp_endpoint_capacity_tokens", "gauge", "Size of its KV cache, scraped.", ("endpoint",)
)
SCRAPE_AGE: Final = Spec(
    "epp_endpoint_scrape_age_seconds",
    "gauge",
    "Age of its last good scrape; absent before the first.",
    ("endpoint",),
)
SCRAPE_OK: Final = Spec(
    "epp_endpoint_scrape_ok", "gauge", "1 if its last scrape gave a page to believe.", ("endpoint",)
)
PREFIX_QUERIES: Final = Spec(
    "epp_endpoint_prefix_queries_tokens_total",
    "counter",
    "Prompt tokens that the server itself looked up in its prefix cache, scraped.",
    ("endpoint",),
)
PREFIX_HITS: Final = Spec(
    "epp_endpoint_prefix_hits_tokens_total",
    "counter",
    "Those that it found: the real hit rate beside the predicted epp_matched_tokens_total / epp_prompt_tokens_total.",
    ("endpoint",),
)
TABLE_ENTRIES: Final = Spec(
    "epp_table_entries", "gauge", "Entries of the prefix table for it.", ("endpoint",)
)
TABLE_BYTES: Final = Spec(
    "epp_table_bytes", "gauge", "Prompt text that its cache is believed to hold.", ("endpoint",)
)
TABLE_CAPACITY: Final = Spec("epp_table_capacity_bytes", "gauge", "Bound of epp_table_bytes.", ("endpoint",))
EVICTIONS: Final = Spec(
    "epp_table_evictions_total", "counter", "Entries evicted from the table for it.", ("endpoint",)
)
PEERS_IN_FLIGHT: Final = Spec(
    "epp_endpoint_peers_in_flight",
    "gauge",
    "Requests that other pickers say they have open there.",
    ("endpoint",),
)
SHARING_CONNECTED: Final = Spec(
    "epp_sharing_connected",
    "gauge",
    "1 while Redis or the workers' socket takes and gives what pickers share.",
)
SHARING_PEERS: Final = Spec("epp_sharing_peers", "gauge", "Other pickers that are alive.")
SHARING_WAITING: Final = Spec(
    "epp_sharing_waiting_bytes", "gauge", "What waits to be told; sharing.outboxBytes bounds it."
)
SHARING_SAID_BATCHES: Final = Spec(
    "epp_sharing_said_batches_total", "counter", "Batches told, life signs included."
)
SHARING_SAID_BYTES: Final = Spec("epp_sharing_said_bytes_total", "counter", "Bytes of them.")
SHARING_SAID_EVENTS: Final = Spec(
    "epp_sharing_said_events_total", "counter", "Events told; a request is two: it begins, it is over."
)
SHARING_DROPPED: Final = Spec(
    "epp_sharing_dropped_events_total",
    "counter",
    "Events that were never told, since there was no room to let them wait.",
)
SHARING_READ_BYTES: Final = Spec(
    "epp_sharing_read_bytes_total",
    "counter",
    "Bytes of batches read; from Redis, this picker's own among them.",
)
SHARING_HEARD: Final = Spec(
    "epp_sharing_heard_events_total", "counter", "Events of others that were applied."
)
SHARING_SKIPPED: Final = Spec(
    "epp_sharing_skipped_events_total",
    "counter",
    "Events of others left out: unresolved (they refer to what was missed), stale (from before an endpoint lost its cache, "
    "or of another process of its name), stranger (no such endpoint here); and malformed batches.",
    ("reason",),
)
SHARING_GAPS: Final = Spec(
    "epp_sharing_gaps_total", "counter", "Times at which batches of another picker were missing."
)
SHARING_ERRORS: Final = Spec(
    "epp_sharing_errors_total", "counter", "Failed calls to Redis or to the workers' socket.", ("reason",)
)
SHARING_TABLES: Final = Spec(
    "epp_sharing_tables_total", "counter", "Whole tables stored for others, or loaded from them.", ("what",)
)
SHARING: Final = (
    *(SHARING_CONNECTED, SHARING_PEERS, SHARING_WAITING, SHARING_SAID_BATCHES, SHARING_SAID_BYTES),
    *(SHARING_SAID_EVENTS, SHARING_DROPPED, SHARING_READ_BYTES, SHARING_HEARD, SHARING_SKIPPED),
    *(SHARING_GAPS, SHARING_ERRORS, SHARING_TABLES),
)
"""Absent where a picker shares with nobody."""
EXACT_MODEL: Final = Spec(
    "epp_exact_model",
    "gauge",
    "1, for the state of exact mode for a base model: waiting (for the first event), checking (whether its prompts turn up), on, off. Off "
    "for every model after an error that nobody foresaw, which is in the log.",
    ("model", "state"),
)
EXACT_PROMPTS: Final = Spec(
    "epp_exact_prompts_total",
    "counter",
    "Routed prompts by what exact mode made of them: mapped to blocks; of those, matched (their blocks turned up at their server) or "
    "missed; or why they were not mapped: adapter, arguments, content, error, template, tokenizer, waiting, model, off.",
    ("model", "result"),
)
EXACT_DROPPED: Final = Spec(
    "epp_exact_dropped_prompts_total",
    "counter",
    "Routed prompts not looked at, since too many waited for it.",
)
EXACT_ENDPOINT: Final = Spec(
    "epp_exact_endpoint",
    "gauge",
    "1, for what is known of an endpoint's cache: following (all), partly (what it stored since we listen), off.",
    ("endpoint", "state"),
)
EXACT_BLOCKS: Final = Spec(
    "epp_exact_endpoint_blocks", "gauge", "Blocks that it holds, by its own events.", ("endpoint",)
)
EXACT_CHUNKS: Final = Spec(
    "epp_exact_endpoint_chunks", "gauge", "Chunks of routed prompts among them.", ("endpoint",)
)
EXACT_EVENTS: Final = Spec(
    "epp_exact_endpoint_events_total", "counter", "KV events that were heard of it.", ("endpoint",)
)
EXACT_GAPS: Final = Spec(
    "epp_exact_gaps_total",
    "counter",
    "Times at which messages of a server were missing: found; of those, lost, since no replay brought them.",
    ("kind",),
)
EXACT_MALFORMED: Final = Spec("epp_exact_malformed_total", "counter", "Messages that were no KV events.")
EXACT_CORRECTIONS: Final = Spec(
    "epp_exact_corrections_total",
    "counter",
    "Of the prefix table, by events: chains credited to a server that held them, entries forgotten that it did not hold.",
    ("kind",),
)
EXACT: Final = (
    *(EXACT_MODEL, EXACT_PROMPTS, EXACT_DROPPED, EXACT_ENDPOINT, EXACT_BLOCKS, EXACT_CHUNKS),
    *(EXACT_EVENTS, EXACT_GAPS, EXACT_MALFORMED, EXACT_CORRECTIONS),
)
"""Absent without exact mode."""
STATE: Final = (
    *(
        POLICY,
        DRAINING,
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
    ),
    *SHARING,
    *EXACT,
)
"""Read from the picker's state when Prometheus asks."""
