"""Spans of Envoy: one for each request, one for its call of the picker,
one for each attempt at a model server. Pure.

The call of the picker carries the trace context in its gRPC metadata,
so that the picker's span is a child of it. Called by `listener` and `bootstrap`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from betterproto2 import Message
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    SocketAddress,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.trace.v3 import OpenTelemetryConfig, TracingHttp
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManagerTracing,
    RequestIdExtension,
)
from envoy_data_plane.envoy.extensions.request_id.uuid.v3 import UuidRequestIdConfig
from envoy_data_plane.envoy.extensions.tracers.opentelemetry.samplers.v3 import (
    ParentBasedSamplerConfig,
    TraceIdRatioBasedSamplerConfig,
)
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType
from envoy_data_plane.google.protobuf import Any as AnyMessage

from epp.envoy.clusters import speaking_http2
from epp.envoy.names import COLLECTOR

if TYPE_CHECKING:
    from epp.config.envoy import EnvoyTracing


def of_requests(settings: EnvoyTracing) -> HttpConnectionManagerTracing:
    provider = OpenTelemetryConfig(
        grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=COLLECTOR)),
        service_name=settings.service_name,
        # Envoy's own `random_sampling` would overrule the caller's context.
        sampler=_extension("parent_based", ParentBasedSamplerConfig(wrapped_sampler=_ratio(settings))),
    )
    return HttpConnectionManagerTracing(
        provider=TracingHttp(name="envoy.tracers.opentelemetry", typed_config=AnyMessage.pack(provider)),
        # Otherwise one span would stand for both sides, and retries would not appear.
        spawn_upstream_span=True,
    )


def request_ids() -> RequestIdExtension:
    """By default a request without a UUID as id is never traced, and the UUID of others is changed."""
    config = UuidRequestIdConfig(pack_trace_reason=False, use_request_id_for_trace_sampling=False)
    return RequestIdExtension(typed_config=AnyMessage.pack(config))


def _ratio(settings: EnvoyTracing) -> TypedExtensionConfig:
    share = FractionalPercent(
        numerator=round(settings.sample_percent * 10_000),
        denominator=FractionalPercentDenominatorType.MILLION,
    )
    return _extension("trace_id_ratio_based", TraceIdRatioBasedSamplerConfig(sampling_percentage=share))


def _extension(name: str, config: Message) -> TypedExtensionConfig:
    return TypedExtensionConfig(
        name=f"envoy.tracers.opentelemetry.samplers.{name}", typed_config=AnyMessage.pack(config)
    )


def collector(settings: EnvoyTracing) -> Cluster:
    host, port = settings.address
    address = Address(socket_address=SocketAddress(address=host, port_value=port))
    endpoint = LbEndpoint(endpoint=Endpoint(address=address))
    return Cluster(
        name=COLLECTOR,
        type=ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(seconds=1),
        load_assignment=ClusterLoadAssignment(
            cluster_name=COLLECTOR, endpoints=[LocalityLbEndpoints(lb_endpoints=[endpoint])]
        ),
        typed_extension_protocol_options=speaking_http2(),
    )
