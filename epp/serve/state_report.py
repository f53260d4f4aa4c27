"""Reports parts of the picker's state as people and Prometheus see them. `app` calls this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epp.base.types import EndpointName
from epp.observe.telemetry.picker_state import EndpointStatus
from epp.picker.picker import Picker
from epp.sources.scraping.scraper import ScrapedServer


def endpoints_of(
    picker: Picker, scraped: Mapping[EndpointName, ScrapedServer], *, now: float
) -> tuple[EndpointStatus, ...]:
    """Return what is known of each endpoint."""
    ready, sick = picker.fleet.ready(), picker.news.ejected(now=now)
    stale_s = picker.policy.spec.scrape.stale_after_seconds
    found = []
    for state in picker.fleet.states():
        endpoint = state.endpoint
        name, rate, ejected = endpoint.name, state.tokens_per_s, sick.get(state, "")
        mirror = picker.caches.table.mirrors[name]
        page = state.metrics
        metrics = page if page is not None and now - page.scraped_at <= stale_s else None
        target, tokens = scraped.get(name), picker.caches.token_estimate(state.model)
        answered_at = target.answered_at if target else None
        found.append(
            EndpointStatus(
                name=name,
                address=endpoint.address.text,
                model=state.model,
                pool=endpoint.pool,
                adapters=tuple(sorted(state.loaded_adapters)),
                ready=state in ready and not ejected,
                failure_share=picker.fleet.failures.share(state, now=now),
                ejected=ejected,
                is_ejected=bool(ejected),
                is_left_out=bool(ejected),
                in_flight=state.in_flight,
                peers_in_flight=state.peers_in_flight,
                backlog_tokens=state.backlog.undone_tokens(now=now, rate=rate),
                computed_tokens_per_s=state.computed_per_s if metrics else 0.0,
                prefill_tokens_per_s=rate,
                running=metrics.running if metrics else None,
                waiting=metrics.waiting if metrics else None,
                kv_usage=metrics.kv_usage if metrics else None,
                prefix_queries_tokens=metrics.prefix_queries if metrics else None,
                prefix_hits_tokens=metrics.prefix_hits if metrics else None,
                predicted_tokens=state.predicted_tokens,
                capacity_tokens=metrics.capacity_tokens if metrics else None,
                bytes_per_token=tokens.bytes_per_token,
                table_entries=mirror.entries,
                table_bytes=mirror.used_bytes,
                table_capacity_bytes=mirror.capacity_bytes,
                table_evictions=mirror.evicted,
                scrape_age_s=max(0.0, now - answered_at) if answered_at is not None else None,
                scrape_ok=target is not None and answered_at is not None and not target.error,
                scrape_error=target.error if target else "",
            )
        )
    return tuple(found)


def dry_run_of(picker: Picker) -> dict[str, Any] | None:
    """Return what the policy in dry run would have done. None: no policy is in dry run."""
    tried = picker.dry_run
    if tried is None:
        return None
    policy = tried.policy
    names = "picks", "agreed", "refused", "prompt_tokens", "cached_tokens", "more_cached_tokens", "more_s"
    counts = {name: getattr(tried, name) for name in names}
    return {"policy": policy.metadata.name, "rule": policy.spec.rule, **counts}
