"""The state of sharing as people and Prometheus see it. Filled in by `state_report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epp.metric import counter, gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStatus:
    """What this picker sends to other pickers and receives from them. All but the first three are totals
    since it started.
    """

    connected: bool = gauge(
        "epp_sharing_connected", "1 while the picker can send and receive over Redis or the workers' socket."
    )
    peers: int = gauge(
        "epp_sharing_peers", "Other pickers from which this picker has received something lately."
    )
    waiting_bytes: int = gauge(
        "epp_sharing_waiting_bytes",
        "Bytes of events that wait to be sent to other pickers. sharing.outboxBytes is the upper bound.",
    )
    said_batches: int = counter(
        "epp_sharing_said_batches_total",
        "Batches sent to other pickers, including empty ones that only say that this picker is alive.",
    )
    said_bytes: int = counter("epp_sharing_said_bytes_total", "Bytes of batches sent to other pickers.")
    said_events: int = counter(
        "epp_sharing_said_events_total",
        "Events sent to other pickers. Each request sends two: one when it starts and one when it ends.",
    )
    dropped_events: int = counter(
        "epp_sharing_dropped_events_total",
        "Events dropped because the outbox was full. Other pickers never see these events.",
    )
    read_bytes: int = counter(
        "epp_sharing_read_bytes_total",
        "Bytes of batches read. From Redis a picker reads its own batches too.",
    )
    heard_events: int = counter(
        "epp_sharing_heard_events_total", "Events of other pickers that were applied."
    )
    skipped: Mapping[str, int] = counter(
        "epp_sharing_skipped_events_total",
        "Events of other pickers that were ignored, by reason: unresolved (the event refers to a batch "
        "that was missed), stale (the event is from before the endpoint lost its cache, or about an "
        "earlier process of the same name), stranger (this picker does not know the endpoint), excessive "
        "(the batch names more chunks than allowed) and malformed (the batch could not be read, or was not "
        "signed with the pool's key).",
        "reason",
    )
    gaps: int = counter("epp_sharing_gaps_total", "How often batches of another picker were missing.")
    errors: Mapping[str, int] = counter(
        "epp_sharing_errors_total",
        "Failed calls to Redis or to the workers' socket, by reason. secret: this picker's hash secret "
        "differs from that of another picker.",
        "reason",
    )
    tables: Mapping[str, int] = counter(
        "epp_sharing_tables_total",
        "Prefix tables that were stored for new pickers, or loaded at start.",
        "what",
    )
