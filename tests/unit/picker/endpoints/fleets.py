"""Fleets of a few endpoints for the tests of this folder, and what happens to them."""

from epp.base.types import Endpoint, EndpointName
from epp.config.policy import PolicySpec
from epp.picker.endpoints.fleet import Fleet

SPEC = PolicySpec()


def a_fleet(*endpoints: Endpoint) -> Fleet:
    fleet = Fleet(SPEC)
    fleet.set_endpoints(endpoints, now=0.0)
    return fleet


def fail_scrapes(fleet: Fleet, *names: str, times: int = 3) -> None:
    for name in names:
        state = fleet.get(EndpointName(name))
        assert state is not None
        for _ in range(times):
            state.scrape_failed(now=1.0)


def ready(fleet: Fleet) -> list[str]:
    return sorted(s.endpoint.name for s in fleet.ready())
