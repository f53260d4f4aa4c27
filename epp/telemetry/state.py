"""What the picker's state looks like to people and to Prometheus: plain values, made anew for each look.

The composition root fills these from the picker and the scraper; `metrics` and `admin` show them. None everywhere
means that the server does not say, or that nothing fresh is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from epp.gate import FlowStatus
from epp.types import Address, EndpointName


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One endpoint now."""

    name: EndpointName
    address: Address
    model: str = ""
    adapters: tuple[str, ...] = ()
    """Believed to be loaded there."""
    ready: bool = True
    """Among the candidates, for other requests than trials."""
    in_flight: int = 0
    """Requests that this picker has open there."""
    peers_in_flight: int = 0
    """Requests that other pickers say they have open there."""
    backlog_tokens: float = 0.0
    """Prompt tokens sent there and not yet computed, as far as this picker knows."""
    prefill_tokens_per_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    prefix_queries_tokens: float | None = None
    prefix_hits_tokens: float | None = None
    """The server's own counters: what it looked up in its prefix cache, and what it found."""
    predicted_tokens: int = 0
    """Prompt tokens sent there in the belief that it held them."""
    capacity_tokens: int | None = None
    cache_size_ratio: float = 1.0
    """Learned: what its cache really keeps, over what is stated or assumed."""
    bytes_per_token: float | None = None
    """Learned, of its model."""
    table_entries: int = 0
    table_bytes: int = 0
    """Prompt text that its cache is believed to hold."""
    table_capacity_bytes: int = 0
    table_evictions: int = 0
    scrape_age_s: float | None = None
    """None: it has never answered."""
    scrape_error: str = ""
    failure_share: float = 0.0
    """Of its recent answers, those that failed."""
    left_out: str = ""
    """Why it gets only trial requests; empty: it does not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStatus:
    """What this picker tells others and hears from them. Totals since it started, but for the first three."""

    connected: bool
    peers: int
    """Other pickers that are alive."""
    waiting_bytes: int
    said_batches: int
    said_bytes: int
    said_events: int
    dropped_events: int
    read_bytes: int
    heard_events: int
    skipped: Mapping[str, int]
    """Events that were heard and left out, by reason."""
    gaps: int
    """Times at which batches of another picker were missing."""
    errors: Mapping[str, int]
    """Failed calls to the link, by reason."""
    tables: Mapping[str, int]
    """Whole tables, stored or loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactModelStatus:
    """What exact mode makes of one base model's prompts."""

    state: str
    """waiting, checking, on or off."""
    reason: str
    prompts: Mapping[str, int]
    """By what became of them: mapped; and of those, matched or missed; or why they were not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactServerStatus:
    """What exact mode knows of one server."""

    state: str
    """following, partly or off."""
    reason: str
    blocks: int
    chunks: int
    events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactStatus:
    """What the servers' own events say. Totals since the picker started, but for blocks and chunks."""

    models: Mapping[str, ExactModelStatus]
    servers: Mapping[EndpointName, ExactServerStatus]
    dropped_prompts: int
    gaps: Mapping[str, int]
    """Times at which messages were missing: found, and of those lost for good."""
    malformed: int
    corrections: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerStatus:
    """The whole picker now."""

    endpoints: tuple[EndpointStatus, ...] = ()
    table_entries: int = 0
    """Entries over all endpoints, each shared chunk counted once for each endpoint that holds it."""
    policy: str = ""
    rule: str = ""
    draining: bool = False
    held_body_bytes: int = 0
    """Of request bodies that wait for the rest of them."""
    overload_ratio: float = 0.0
    """Share of new requests that are routed by load without reading them."""
    goal_s: float = 2.0
    """The wait at which the policy takes a pool to be saturated."""
    flow: Sequence[FlowStatus] = ()
    """What flow control holds, by base model; empty where it is off."""
    source_failures: Mapping[str, int] = field(default_factory=dict)
    """How often each source of news failed and was started again."""
    log_lines_left_out: Mapping[str, int] = field(default_factory=dict)
    """By reason."""
    recorded: Mapping[str, int] = field(default_factory=dict)
    """Requests by what became of their lines in the recording; empty: nothing is recorded."""
    spans: Mapping[str, int] = field(default_factory=dict)
    """Of traces, by what became of them; empty: tracing is off."""
    sharing: SharingStatus | None = None
    """None: it shares with nobody."""
    exact: ExactStatus | None = None
    """None: the table is approximate."""


StatusSource = Callable[[], PickerStatus]
