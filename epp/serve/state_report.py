"""Reports the picker's state as people and Prometheus see it, from the picker, the scraper and the sharing.
`app` calls this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from epp.base.types import EndpointName
from epp.observe.telemetry import picker_state as shown
from epp.picker.picker import Picker
from epp.sources.scraping.scraper import ScrapeAge, Scraper
from epp.sources.sharing.service import SharingService
from epp.sources.sharing_status import SharingStatus

if TYPE_CHECKING:
    from epp.sources.kvevents.service import ExactService  # needs ZeroMQ, which is an extra


def status_of(
    picker: Picker,
    scraper: Scraper,
    sharing: SharingService | None = None,
    exact: ExactService | None = None,
    *,
    now: float,
) -> shown.PickerStatus:
    """Return a snapshot of the state, as far as these parts know it. Nothing in it changes later."""
    spec = picker.policy.spec
    return shown.PickerStatus(
        endpoints=endpoints_of(picker, scraper.ages(now), now=now),
        table_entries=picker.caches.table.entries,
        policy=picker.policy.metadata.name,
        rule=spec.rule,
        policy_info={(picker.policy.metadata.name, spec.rule): 1},
        without_model_list=len(picker.fleet.served.unlisted),
        goal_s=spec.flow.goal_seconds,
        sharing=_sharing(sharing) if sharing is not None else None,
        exact=exact.status if exact is not None else None,
    )


def endpoints_of(
    picker: Picker, ages: Mapping[EndpointName, ScrapeAge], *, now: float
) -> tuple[shown.EndpointStatus, ...]:
    """Return what is known of each endpoint. ages: of the last scrapes."""
    ready, sick = picker.fleet.ready(), picker.news.ejected(now=now)
    stale_s = picker.policy.spec.scrape.stale_after_seconds
    found = []
    for state in picker.fleet.states():
        endpoint = state.endpoint
        name, rate, ejected = endpoint.name, state.tokens_per_s, sick.get(state, "")
        mirror = picker.caches.table.mirrors[name]
        metrics = state.fresh(now=now, stale_after_s=stale_s)
        age, tokens = ages.get(name), picker.caches.token_estimate(state.model)
        found.append(
            shown.EndpointStatus(
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
                scrape_age_s=age.age_s if age else None,
                scrape_ok=age is not None and age.age_s is not None and not age.error,
                scrape_error=age.error if age else "",
            )
        )
    return tuple(found)


def _sharing(service: SharingService) -> SharingStatus:
    found = deepcopy(service.exchange.counts)
    found.connected, found.peers = service.connected, service.exchange.listener.peers
    return found


def dry_run_of(picker: Picker) -> dict[str, Any] | None:
    """Return what the policy in dry run would have done. None: no policy is in dry run."""
    tried = picker.dry_run
    if tried is None:
        return None
    policy = tried.policy
    names = "picks", "agreed", "refused", "prompt_tokens", "cached_tokens", "more_cached_tokens", "more_s"
    counts = {name: getattr(tried, name) for name in names}
    return {"policy": policy.metadata.name, "rule": policy.spec.rule, **counts}
