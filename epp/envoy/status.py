"""A second listener of the generated bootstrap, for those who watch Envoy: probes and Prometheus.

Envoy's admin page can stop it and show its certificates, so it stays on loopback; a kubelet and Prometheus come from outside the pod.
This listener passes on two of its pages, read only, and nothing else. Pure. Called by `bootstrap`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any as AnyMessage

from epp.envoy.clusters import envoy_address

if TYPE_CHECKING:
    from epp.config import Config

NAME: Final = "status"
ADMIN: Final = "envoy-admin"
"""Cluster of Envoy's own admin page."""

PAGES: Final = ("/ready", "/stats/prometheus")


def listener(config: Config) -> Listener:
    """Where `envoy.status` says."""
    manager = HttpConnectionManager(
        stat_prefix=NAME,
        normalize_path=True,
        http_filters=[
            HttpFilter(name="envoy.filters.http.router", typed_config=AnyMessage.pack(Router())),
        ],
        route_config=RouteConfiguration(
            name=NAME,
            virtual_hosts=[
                VirtualHost(name=NAME, domains=["*"], routes=[*map(_page, PAGES), _nothing_else()])
            ],
        ),
    )
    return Listener(
        name=NAME,
        address=envoy_address(config.envoy.status),
        ignore_global_conn_limit=True,
        filter_chains=[
            FilterChain(
                filters=[
                    Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=AnyMessage.pack(manager),
                    )
                ]
            )
        ],
    )


def admin(config: Config) -> Cluster:
    """Envoy's admin page as a cluster of its own."""
    endpoint = LbEndpoint(endpoint=Endpoint(address=envoy_address(config.envoy.admin)))
    return Cluster(
        name=ADMIN,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=1),
        load_assignment=ClusterLoadAssignment(
            cluster_name=ADMIN, endpoints=[LocalityLbEndpoints(lb_endpoints=[endpoint])]
        ),
    )


def _page(path: str) -> Route:
    # The admin page's POSTs change things.
    only_get = HeaderMatcher(name=":method", string_match=StringMatcher(exact="GET"))
    return Route(match=RouteMatch(path=path, headers=[only_get]), route=RouteAction(cluster=ADMIN))


def _nothing_else() -> Route:
    return Route(match=RouteMatch(prefix="/"), direct_response=DirectResponseAction(status=404))
