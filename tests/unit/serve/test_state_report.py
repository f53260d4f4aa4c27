"""The picker's state as people, Prometheus and the status in a cluster see it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest

from epp.base.types import Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import Metadata, PolicySpec, check_spec
from epp.observe.telemetry.picker_state import EndpointStatus
from epp.picker.picker import Picker
from epp.serve.state_report import dry_run_of, endpoints_of
from epp.sources.keep import Sources
from epp.sources.scraping.scraper import Scraper
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, policy_of, serve, text

PAGE = EndpointMetrics(
    scraped_at=10.0, running=3, waiting=1, kv_usage=0.5, prefix_queries=200.0, prefix_hits=50.0
)


@dataclass
class ReportedPicker:
    picker: Picker
    scraper: Scraper


def a_site(*, on: Sequence[Endpoint] = (), spec: PolicySpec = PolicySpec()) -> ReportedPicker:  # noqa: B008 - frozen
    picker = a_picker(spec, on=on or endpoints("ab"))
    scraper = Scraper(
        settings=lambda: picker.policy.spec.scrape,
        on_metrics=lambda name, metrics: picker.news.observe(name, metrics, now=10.0),
        in_use=lambda _: False,
        clock=lambda: 10.0,
        keep=Sources(rng=random.Random(1)).keep,
        rng=random.Random(1),
    )
    scraper.set_endpoints(picker.news.endpoints())
    return ReportedPicker(picker, scraper)


def reported(site: ReportedPicker, *, now: float) -> Sequence[EndpointStatus]:
    return endpoints_of(site.picker, site.scraper.targets, now=now)


def test_fresh_numbers_of_a_server_are_shown_and_stale_ones_are_unknown() -> None:
    site = a_site()
    site.picker.news.observe(EndpointName("a"), PAGE, now=10.0)
    site.scraper.targets[EndpointName("a")].answered_at = 10.0
    fresh, unread = reported(site, now=11.0)
    assert (fresh.running, fresh.waiting, fresh.kv_usage, fresh.prefix_hits_tokens) == (3, 1, 0.5, 50.0)
    assert (fresh.scrape_age_s, fresh.scrape_ok, unread.scrape_ok) == (1.0, True, False)
    assert (unread.running, unread.kv_usage, unread.scrape_age_s) == (None, None, None)
    site.scraper.targets[EndpointName("a")].error = "refused"
    (stale, _) = reported(site, now=100.0)
    assert (stale.running, stale.prefix_queries_tokens) == (None, None)
    assert (stale.scrape_age_s, stale.scrape_ok, stale.scrape_error) == (90.0, False, "refused")


def test_requests_in_flight_and_expected_hits_are_the_pickers_own() -> None:
    site = a_site(on=endpoints("a"))
    for now in (9.0, 10.0):
        serve(site.picker, ask(text("p")), now=now)
    site.picker.pick(ask(text("p")), now=11.0)
    (endpoint,) = reported(site, now=11.0)
    assert endpoint.in_flight == 1
    assert endpoint.predicted_tokens > 0
    assert endpoint.table_entries == site.picker.caches.table.entries > 0


def test_an_endpoint_whose_scrapes_fail_is_not_ready() -> None:
    spec = check_spec({"scrape": {"failuresToEject": 1}})
    site = a_site(spec=spec)
    site.picker.news.observe(EndpointName("a"), PAGE, now=10.0)
    site.picker.news.observe(EndpointName("b"), None, now=10.0)
    by_name = {each.name: each.ready for each in endpoints_of(site.picker, {}, now=10.5)}
    assert by_name == {"a": True, "b": False}


@pytest.mark.parametrize("rule", ["least-cost", "random"])
def test_a_policy_in_dry_run_is_reported_with_its_picks(rule: str) -> None:
    site = a_site(on=endpoints("a"))
    assert dry_run_of(site.picker) is None
    tried = msgspec.structs.replace(policy_of(check_spec({"rule": rule})), metadata=Metadata(name="tried"))
    site.picker.set_dry_run(tried)
    serve(site.picker, ask(text("p")), now=10.0)
    shown = dry_run_of(site.picker)
    assert shown is not None
    assert (shown["policy"], shown["rule"], shown["picks"], shown["agreed"]) == ("tried", rule, 1, 1)
