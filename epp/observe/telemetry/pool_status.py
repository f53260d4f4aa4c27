"""Computes numbers about all servers of one base model in one pool, for autoscalers (docs/autoscaling.md).
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from epp.base.metric import gauge
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The ready servers of one base model in one InferencePool."""

    model: str
    pool: str
    """Empty where endpoints come from a file."""
    servers: int = gauge(
        "epp_pool_servers",
        "Ready servers of the base model in the InferencePool. The label pool is empty where endpoints "
        "come from a file.",
    )
    busy: float = gauge(
        "epp_pool_busy_share",
        "Prompt tokens per second that the ready servers of the base model computed lately, divided by the "
        "tokens per second that they can compute. Computed tokens come from the counters of the servers; "
        "prefix hits do not count.",
    )
    waiting_s: Mapping[str, float] = gauge(
        "epp_pool_undone_seconds",
        "Prompt tokens that are not computed yet, divided by the tokens that all ready servers of the base "
        "model compute per second. servers: tokens that were sent to servers; every replica reports them for "
        "the whole pool. queue: tokens of the requests that flow control holds in this replica.",
        "where",
    )
    saturation: float = gauge(
        "epp_pool_saturation",
        "The largest of three numbers: epp_pool_busy_share, epp_pool_undone_seconds divided by "
        "flow.goalSeconds, and the mean share of the KV caches that running requests use. At 1 there are too "
        "few servers of the base model. This metric is for autoscalers and does not need flow control. "
        "It is 1, with an empty pool, where requests wait for the first server (flow.waitForServerSeconds).",
    )


def pools_of(status: PickerStatus) -> list[PoolStatus]:
    """Return the pools of each base model. A pool without a ready server whose rate is known is left out,
    because its capacity is unknown. A model for which requests wait without a server needs one at once.
    """
    places: dict[tuple[str, str], list[EndpointStatus]] = {}
    rates: dict[str, float] = {}
    for endpoint in status.endpoints:
        if endpoint.ready and endpoint.prefill_tokens_per_s:
            places.setdefault((endpoint.model, endpoint.pool), []).append(endpoint)
            rates[endpoint.model] = rates.get(endpoint.model, 0.0) + endpoint.prefill_tokens_per_s
    # Waiting requests may go to any pool of their model. So each pool gets a share of them by its rate.
    waiting = {flow.model: sum(flow.tokens.values()) for flow in status.flow}
    return [
        _pool(model, pool, servers, waiting.get(model, 0) / rates[model], status.goal_s)
        for (model, pool), servers in places.items()
    ] + [
        PoolStatus(model=m, pool="", servers=0, busy=0.0, waiting_s={}, saturation=1.0)
        for m in status.unserved
        if m not in rates
    ]


def _pool(
    model: str, pool: str, servers: Sequence[EndpointStatus], queued_s: float, goal_s: float
) -> PoolStatus:
    rate = sum(server.prefill_tokens_per_s or 0.0 for server in servers)
    # Some engines, such as llama.cpp, count what an idle server has cached.
    usages = [
        0.0 if server.running == 0 and not server.waiting else server.kv_usage
        for server in servers
        if server.kv_usage is not None
    ]
    kv_usage = mean(usages) if usages else 0.0
    # No more than a server can compute, whatever its counters say: wrong ones must not start other servers.
    busy = sum(min(s.computed_tokens_per_s, s.prefill_tokens_per_s or 0.0) for s in servers) / rate
    undone_s = sum(server.backlog_tokens for server in servers) / rate
    return PoolStatus(
        model=model,
        pool=pool,
        servers=len(servers),
        busy=busy,
        waiting_s={"servers": undone_s, "queue": queued_s},
        saturation=max(kv_usage, busy, (undone_s + queued_s) / goal_s),
    )
