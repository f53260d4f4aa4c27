"""Declares the counters of events. Each is a plain number with a metric at its field. `metrics` adds to them.

prometheus_client is made for any program, so each addition there takes a lock, checks labels and walks the
buckets. Here one thread counts, and the same thread answers Prometheus, so a plain addition is enough.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Final

from epp.base.metric import counter, gauge, histogram


class Distribution:
    """The values of a histogram. A value that equals a bound counts in the bucket of this bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """For each bucket the number of its values. The last bucket has no bound."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


ByLabel = defaultdict[str, float]
ByLabels = defaultdict[tuple[str, ...], float]
_fine: Final = partial(
    Distribution, (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
)
_ttft: Final = partial(Distribution, (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0))
_lag: Final = partial(Distribution, (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0))


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests and their answers."""

    requests: ByLabels = counter(
        "epp_requests_total",
        "Requests that have finished, by outcome: ended, aborted (mostly the client left), failed, detached "
        "(the picker let the stream go early) or refused. A refused request has no API kind.",
        "outcome",
        "kind",
    )
    in_flight: int = gauge(
        "epp_in_flight", "Requests that have an endpoint and whose streams are still open."
    )
    pick_seconds: Distribution = histogram(
        "epp_pick_seconds",
        "Time to read the body of a request and to choose an endpoint.",
        default_factory=_fine,
    )
    flow_waited: Distribution = histogram(
        "epp_flow_waited_seconds",
        "How long flow control held requests before it let them go. Requests that were not held do not "
        "count.",
        default_factory=_ttft,
    )
    unread: ByLabel = counter(
        "epp_unread_bodies_total",
        "Requests that were routed by load because the picker did not read their body, by reason: "
        "costly_body (reading the body would hold up all other requests), encoded_body (the body is "
        "compressed), partial_body and body_not_seen (the data plane did not send all of the body), "
        "not_understood (the body does not have the shape of its API), overload (the picker had too much to "
        "do), no_room (unfinished bodies together are over streams.maxHeldBodyBytes).",
        "reason",
    )
    prompt_tokens: int = counter(
        "epp_prompt_tokens_total",
        "Estimated prompt tokens of the requests that servers have computed.",
    )
    matched_tokens: int = counter(
        "epp_matched_tokens_total",
        "Tokens of epp_prompt_tokens_total that the picker expected in the prefix cache of the chosen "
        "endpoint.",
    )
    sampled_predicted: int = counter(
        "epp_sampled_predicted_tokens_total",
        "Tokens that the picker expected in the cache, for sampled answers in which the server reported "
        "its cached tokens.",
    )
    sampled_cached: int = counter(
        "epp_sampled_cached_tokens_total",
        "Tokens that the servers reported as cached, for the same answers as "
        "epp_sampled_predicted_tokens_total. Divide one by the other to see how good the prediction is.",
    )
    sampled_ttft: Distribution = histogram(
        "epp_sampled_ttft_seconds",
        "Time from the pick to the first token, for sampled streamed answers.",
        default_factory=_ttft,
    )
    sampled_predicted_s: float = counter(
        "epp_sampled_predicted_seconds_total",
        "Predicted times from the pick to the end of the prefill, for the same answers. Divide by "
        "the sum of epp_sampled_ttft_seconds to see how good the prediction is.",
    )
    refused: ByLabel = counter(
        "epp_refused_total",
        "Requests that the picker answered itself with an error.",
        "reason",
    )
    mismatches: int = counter(
        "epp_served_mismatch_total",
        "Answers that came from another endpoint than the first choice, because the data plane retried or "
        "skipped the first choice.",
    )
    protocol_errors: ByLabel = counter(
        "epp_protocol_errors_total",
        "Messages from the data plane that break the protocol.",
        "reason",
    )
    dry_run: ByLabels = counter(
        "epp_dry_run_picks_total",
        "Picks that a policy in dry run scored too. agrees says whether this policy would have picked the "
        "same endpoint.",
        "policy",
        "agrees",
    )


@dataclass(slots=True)
class ServerCounts:
    """Counts of the requests of one endpoint. They are removed with the endpoint."""

    picks: ByLabel = counter(
        "epp_picks_total",
        "Picks, by the first endpoint of the answer and the reason of the choice.",
        "reason",
    )
    prefill_picks: int = counter(
        "epp_prefill_picks_total",
        "Picks in which a second endpoint was asked to compute the prompt, by this prefill endpoint.",
    )
    prefill_tokens: int = counter(
        "epp_prefill_tokens_total",
        "Prompt tokens that prefill endpoints were asked to compute in the picks of epp_prefill_picks_total.",
    )
    answers: ByLabel = counter(
        "epp_answers_total",
        "Answers that have begun, by the endpoint that served and the class of the status line: 2xx, 3xx, "
        "4xx, 404, 429 or 5xx. An error that a body tells after a 200 counts as 2xx here; the decision has "
        "its code, and epp_endpoint_failure_share rises.",
        "class",
    )
    cut: int = counter(
        "epp_cut_answers_total",
        "Answers of an endpoint that began with a 2xx status and that the endpoint broke off midway, as "
        "the data plane's access log says.",
    )
    headers_s: float = counter(
        "epp_time_to_headers_seconds_total",
        "Seconds from the pick to the headers of the answer, added up over the answers of an endpoint. "
        "Divide by epp_answers_total for the mean.",
    )


@dataclass(slots=True)
class ProcessCounts:
    """Counts of what this process reads besides requests, and of its event loop."""

    reloads: ByLabels = counter(
        "epp_reloads_total",
        "Changes of watched files, by file and by result (accepted or refused).",
        "source",
        "result",
    )
    reload_ok: ByLabel = gauge(
        "epp_reload_ok",
        "1 while the newest content of a watched file is in use, 0 while the picker refuses this content.",
        "source",
    )
    followed: ByLabel = gauge(
        "epp_kubernetes_followed",
        "1 while the picker can watch this resource on the API server, 0 while it works with the last "
        "known state.",
        "resource",
    )
    policies: ByLabel = gauge(
        "epp_kubernetes_policies",
        "PrefixRoutingPolicies for the pool, by state (accepted or refused).",
        "state",
    )
    loop_lag: Distribution = histogram(
        "epp_loop_lag_seconds",
        "Delay of the event loop: how late the loop runs a task that is due, measured ten times a second. "
        "Requests wait this long before the picker reads them.",
        default_factory=_lag,
    )
    tasks: int = gauge(
        "epp_tasks",
        "Tasks of the event loop: one for each open stream, scrape and connection, and a few more.",
    )
