"""A second listener of the generated bootstrap, for those who watch Envoy: probes and Prometheus.

Envoy's admin page can stop Envoy and show its certificates, so it stays on loopback. A kubelet and Prometheus
connect from outside the pod. This listener serves only two of the admin pages, read-only. Pure. Called by
`bootstrap`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    Route,
    RouteAction,
    RouteMatch,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpConnectionManager
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from epp.envoy.clusters import static
from epp.envoy.listener import listening, routed, router

if TYPE_CHECKING:
    from epp.config.settings import Config

NAME: Final = "status"
ADMIN: Final = "envoy-admin"
"""Cluster of Envoy's own admin page."""

PAGES: Final = ("/ready", "/stats/prometheus")


def listener(config: Config) -> Listener:
    """The listener at `envoy.status`. Its connections do not count among the clients', and end soon."""
    manager = HttpConnectionManager(
        stat_prefix=NAME,
        normalize_path=True,
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=timedelta(seconds=30)),
        request_headers_timeout=timedelta(seconds=5),
        http_filters=[router()],
        route_config=routed(NAME, [*map(_page, PAGES), _nothing_else()]),
    )
    return listening(config.envoy.status, manager, ignore_global_conn_limit=True)


def admin(config: Config) -> Cluster:
    """Envoy's admin page as a cluster of its own."""
    return static(ADMIN, [config.envoy.admin])


def _page(path: str) -> Route:
    # POST requests to the admin page change Envoy's state.
    only_get = HeaderMatcher(name=":method", string_match=StringMatcher(exact="GET"))
    return Route(match=RouteMatch(path=path, headers=[only_get]), route=RouteAction(cluster=ADMIN))


def _nothing_else() -> Route:
    return Route(match=RouteMatch(prefix="/"), direct_response=DirectResponseAction(status=404))
