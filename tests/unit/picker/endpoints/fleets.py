"""Fleets of a few endpoints for the tests of this folder, and what happens to them."""

from epp.base.types import Endpoint, EndpointName
from epp.config.policy import PolicySpec
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet
from epp.picker.fleet_news import FleetNews
from epp.picker.prefix_index.secret import HashSecret

SPEC = PolicySpec()


def news_of(*endpoints: Endpoint, refuses: bool = True) -> FleetNews:
    news = FleetNews(SPEC, lambda _: None, secret=HashSecret(), refuses_unknown_models=refuses)
    news.set_endpoints(endpoints, now=0.0)
    return news


def a_fleet(*endpoints: Endpoint) -> Fleet:
    return news_of(*endpoints).fleet


def state_of(fleet: Fleet, name: str) -> EndpointState:
    found = fleet.get(EndpointName(name))
    assert found is not None
    return found


def fail_scrapes(fleet: Fleet, *names: str, times: int = 3) -> None:
    for name in names:
        for _ in range(times):
            state_of(fleet, name).scrape_failed(now=1.0)


def ready(fleet: Fleet) -> list[str]:
    return sorted(s.endpoint.name for s in fleet.ready())
