"""Defines the state of sharing as people and Prometheus see it. `sharing` counts in it."""

from collections import Counter
from dataclasses import dataclass

from epp.base.metric import counter, gauge


@dataclass(slots=True)
class SharingStatus:
    """What this picker sends to other pickers and receives from them. The first two fields are filled in for
    each report. All others are totals since the picker started.
    """

    connected: bool = gauge(
        "epp_sharing_connected", "1 while the picker can send and receive over Redis or the workers' socket."
    )
    peers: int = gauge(
        "epp_sharing_peers", "Other pickers from which this picker has received something lately."
    )
    sent_events: int = counter(
        "epp_sharing_sent_events_total",
        "Events sent to other pickers. Each request sends two: one when it starts and one when it ends.",
    )
    dropped_events: int = counter(
        "epp_sharing_dropped_events_total",
        "Events dropped because the outbox was full. Other pickers never see these events.",
    )
    applied_events: int = counter(
        "epp_sharing_applied_events_total", "Events of other pickers that were applied."
    )
    skipped: Counter[str] = counter(
        "epp_sharing_skipped_events_total",
        "Events of other pickers that were ignored, by reason: stale (the event is from before the endpoint "
        "lost its cache, or about an earlier process of the same name), stranger (this picker does not know "
        "the endpoint) and malformed (the batch could not be read, or was not signed with the pool's key).",
        "reason",
        default_factory=lambda: Counter(stale=0, stranger=0, malformed=0),
    )
    gaps: int = counter("epp_sharing_gaps_total", "How often batches of another picker were missing.")
    errors: Counter[str] = counter(
        "epp_sharing_errors_total",
        "Failed calls to Redis or to the workers' socket, by reason. secret: this picker's hash secret "
        "differs from that of another picker.",
        "reason",
        default_factory=Counter,
    )
