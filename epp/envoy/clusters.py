"""The two clusters of the generated bootstrap: the model servers, and the picker's workers.

Pure: makes typed Envoy messages from the configuration. Settings whose default would fail unnoticed are set
here, each with a comment that says why. Called by `bootstrap`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address as EnvoyAddress,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ConfigSource,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    PathConfigSource,
    Pipe,
    SocketAddress,
    TcpKeepalive,
    TypedExtensionConfig,
    WatchedDirectory,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions as UpstreamHttpProtocolOptions,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any as AnyMessage

from epp.envoy import tls
from epp.envoy.names import DESTINATION, LB_NAMESPACE, MODEL_SERVERS, PICKER, PICKER_SERVICE
from epp.types import Address

if TYPE_CHECKING:
    from epp.config.settings import Config

UPSTREAM_HTTP: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

UPSTREAM_IDLE: Final = timedelta(seconds=3)
"""Less than the 5 s after which vLLM's server closes an idle connection. A request sent at that moment would
be lost."""


def envoy_address(text: str) -> EnvoyAddress:
    """`ip:port` or `unix:/path` in Envoy's form."""
    if text.startswith("unix:"):
        return EnvoyAddress(pipe=Pipe(path=text.removeprefix("unix:")))
    address = Address.parse(text)
    return EnvoyAddress(socket_address=SocketAddress(address=address.host, port_value=address.port))


def model_servers(config: Config) -> Cluster:
    """The model servers. Envoy reads them from the endpoints file, and the picker chooses among them."""
    # Absolute, because Envoy may be started from another directory than the picker.
    eds_file = os.path.abspath(config.envoy.eds_file)  # noqa: PTH100 - resolves no links: a mounted file may be one
    return Cluster(
        name=MODEL_SERVERS,
        type=ClusterDiscoveryType.EDS,
        eds_cluster_config=ClusterEdsClusterConfig(
            eds_config=ConfigSource(
                path_config_source=PathConfigSource(
                    path=eds_file,
                    # The directory, not the file:
                    # a rename replaces the whole file at once, and only watching the directory shows it.
                    watched_directory=WatchedDirectory(path=str(PurePath(eds_file).parent)),
                )
            )
        ),
        # The default is 5 s. If a server has vanished from the network, each request would wait 5 s before
        # the next server is tried.
        connect_timeout=timedelta(seconds=1),
        load_balancing_policy=_follow_the_pick(),
        circuit_breakers=_wide_breakers(),
        upstream_connection_options=UpstreamConnectionOptions(
            # Finds a machine that died before its answer began, since no time-out bounds such an answer.
            tcp_keepalive=TcpKeepalive(keepalive_probes=3, keepalive_time=30, keepalive_interval=5)
        ),
        typed_extension_protocol_options={
            UPSTREAM_HTTP: AnyMessage.pack(
                UpstreamHttpProtocolOptions(
                    common_http_protocol_options=HttpProtocolOptions(idle_timeout=UPSTREAM_IDLE),
                    explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                        http_protocol_options=Http1ProtocolOptions()
                    ),
                )
            )
        },
    )


def static(name: str, addresses: Iterable[str], **settings: Any) -> Cluster:
    """A cluster of addresses that never change. `settings` are the other fields of the message."""
    endpoints = [LbEndpoint(endpoint=Endpoint(address=envoy_address(address))) for address in addresses]
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=1),
        load_assignment=ClusterLoadAssignment(
            cluster_name=name, endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)]
        ),
        **settings,
    )


def picker(config: Config) -> Cluster:
    """The cluster of the picker's workers. Each worker is an endpoint."""
    return static(
        PICKER,
        config.listen.addresses(workers=config.workers),
        health_checks=[_grpc_health_check()],
        common_lb_config=ClusterCommonLbConfig(
            # By default, once half the workers are down Envoy sends to the dead ones again ("panic").
            healthy_panic_threshold=Percent(value=0.0),
            # By default a second change of health within a second waits for the end of that second.
            update_merge_window=timedelta(0),
        ),
        circuit_breakers=_wide_breakers(),
        transport_socket=tls.upstream(config),
        typed_extension_protocol_options=speaking_http2(),
    )


def speaking_http2() -> dict[str, AnyMessage]:
    return {
        UPSTREAM_HTTP: AnyMessage.pack(
            UpstreamHttpProtocolOptions(
                explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                    http2_protocol_options=Http2ProtocolOptions()
                )
            )
        )
    }


def _follow_the_pick() -> LoadBalancingPolicy:
    """Try the picker's list of addresses in order, one for each attempt. Round robin if there is no list or
    it is used up.

    The list comes only from the metadata, because a client could send a header. An address that Envoy does
    not know is skipped.
    """
    fallback = _policy("envoy.load_balancing_policies.round_robin", AnyMessage.pack(RoundRobin()))
    source = OverrideHostOverrideHostSource(
        metadata=MetadataKey(key=LB_NAMESPACE, path=[MetadataKeyPathSegment(key=DESTINATION)])
    )
    override = OverrideHost(override_host_sources=[source], fallback_policy=fallback)
    return _policy("envoy.load_balancing_policies.override_host", AnyMessage.pack(override))


def _policy(name: str, config: AnyMessage) -> LoadBalancingPolicy:
    extension = TypedExtensionConfig(name=name, typed_config=config)
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=extension)])


def _wide_breakers() -> CircuitBreakers:
    """Limits so large that they never act, since admission is the picker's work.

    The defaults are 1,024 of each and 3 retries. Every request holds a stream at the picker until its answer
    ends, so beyond 1,024 requests the others would bypass the picker without an error. If the first choice of
    a burst dies, all but 3 requests would fail.
    """
    thresholds = CircuitBreakersThresholds(
        max_connections=100_000, max_pending_requests=100_000, max_requests=100_000, max_retries=1_000
    )
    return CircuitBreakers(thresholds=[thresholds])


def _grpc_health_check() -> HealthCheck:
    """Take a dead or hung worker out, and let it back at once.

    Until then its share of the requests bypasses the picker. A TCP check would not notice a hung worker. A
    killed worker is out after at most 1.2 s, a hung one after about 3 s.
    """
    second = timedelta(seconds=1)
    return HealthCheck(
        timeout=second,
        interval=second,
        # Until the first request, the default is to check once a minute.
        no_traffic_interval=second,
        no_traffic_healthy_interval=second,
        # One slow answer proves nothing, so a second check follows the first failure at once.
        unhealthy_threshold=2,
        unhealthy_edge_interval=timedelta(milliseconds=200),
        unhealthy_interval=second,
        healthy_threshold=1,
        grpc_health_check=HealthCheckGrpcHealthCheck(service_name=PICKER_SERVICE),
    )
