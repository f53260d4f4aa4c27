"""The listener of the generated bootstrap: everything from the client's connection to the route.

Pure: makes typed Envoy messages from the configuration. Settings whose default would fail unnoticed are set
here, each with a comment that says why. Called by `bootstrap`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    SubstitutionFormatString,
    TrafficDirection,
    TransportSocket,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    FilterConfig,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.access_loggers.stream.v3 import StdoutAccessLog
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExtProcOverrides,
    ExtProcPerRoute,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpConnectionManagerUpgradeConfig,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any as AnyMessage
from envoy_data_plane.google.protobuf import Struct

from epp.envoy import cut_answers, framing, replies, tls, tracing
from epp.envoy.clusters import envoy_address
from epp.envoy.names import (
    DESTINATION,
    LB_NAMESPACE,
    MODEL_SERVERS,
    PICKER,
    STAT_PREFIX,
    SUBSET_NAMESPACE,
)
from epp.errors import BlockedPathError
from epp.types import BEGAN, SERVER_HEADERS

if TYPE_CHECKING:
    from epp.config.envoy import Envoy as EnvoyConfig
    from epp.config.settings import Config

EXT_PROC: Final = "envoy.filters.http.ext_proc"

ACCESS_LOG_FIELDS: Final = {
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "duration_ms": "%DURATION%",
    "flags": "%RESPONSE_FLAGS%",
    "headers_ms": "%RESPONSE_DURATION%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(:PATH)%",
    "picked": f"%DYNAMIC_METADATA({LB_NAMESPACE}:{DESTINATION})%",
    "protocol": "%PROTOCOL%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "served_by": "%UPSTREAM_HOST%",
    "status": "%RESPONSE_CODE%",
    "time": "%START_TIME%",
}
"""If `picked` is empty, the request bypassed the picker."""

MAX_HEADER_FIELDS: Final = 128
"""A client may send 100. Envoy and the picker add up to ten, and more than this number would be an error."""

MAX_STREAMS: Final = 100
"""HTTP/2 streams of one connection. A client with more waits or opens another connection."""


def gateway(config: Config) -> Listener:
    """The one listener for clients of the gateway."""
    envoy = config.envoy
    return listening(
        envoy.listen,
        _connection_manager(config),
        # `drain_listeners?inboundonly` then closes this listener and leaves the status page open.
        traffic_direction=TrafficDirection.INBOUND,
        transport_socket=tls.downstream(config, protocols=["h2", "http/1.1"]),
        handshake_s=envoy.header_timeout_seconds,
    )


def listening(
    address: str,
    manager: HttpConnectionManager,
    *,
    transport_socket: TransportSocket | None = None,
    handshake_s: float | None = None,
    **settings: Any,
) -> Listener:
    """A listener with `manager` on it, under its name; `settings` are the message's other fields."""
    http = Filter(name="envoy.filters.network.http_connection_manager", typed_config=AnyMessage.pack(manager))
    chain = FilterChain(
        filters=[http],
        transport_socket=transport_socket,
        transport_socket_connect_timeout=None if handshake_s is None else timedelta(seconds=handshake_s),
    )
    return Listener(
        name=manager.stat_prefix, address=envoy_address(address), filter_chains=[chain], **settings
    )


def router() -> HttpFilter:
    """The last filter: it carries out the route."""
    return HttpFilter(name="envoy.filters.http.router", typed_config=AnyMessage.pack(Router()))


def routed(name: str, routes: list[Route]) -> RouteConfiguration:
    """`routes` for every host."""
    return RouteConfiguration(name=name, virtual_hosts=[VirtualHost(name=name, domains=["*"], routes=routes)])


def _connection_manager(config: Config) -> HttpConnectionManager:
    envoy = config.envoy
    # Off unless a route turns it on. A request that is not valid HTTP has no route. Its error would wait for
    # the picker's answer, and Envoy closes the connection before the answer comes.
    ext_proc = HttpFilter(
        name=EXT_PROC, typed_config=AnyMessage.pack(_external_processor(config)), disabled=True
    )
    return HttpConnectionManager(
        stat_prefix=STAT_PREFIX,
        # AUTO also accepts HTTP/2 by prior knowledge in clear text. With TLS, the handshake shows the
        # version.
        codec_type=(
            HttpConnectionManagerCodecType.AUTO
            if envoy.http2_cleartext or envoy.tls
            else HttpConnectionManagerCodecType.HTTP1
        ),
        # A model server reads `/x/%2e%2e/metrics` as `/metrics`. The routes must do the same, or blocked
        # paths would be open.
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=HttpConnectionManagerPathWithEscapedSlashesAction.UNESCAPE_AND_FORWARD,
        # Removed before any filter runs, so also for requests that bypass the picker: no client may name its
        # server, or a server that its server calls.
        early_header_mutation_extensions=[_strip()],
        # The gateway is an edge: `x-envoy-*` headers of outside clients (retries, time-outs) are not obeyed
        # ...
        use_remote_address=True,
        # ... but the caller's request id is kept unchanged, and returned, because decisions are found by it.
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        common_http_protocol_options=HttpProtocolOptions(max_headers_count=MAX_HEADER_FIELDS),
        http2_protocol_options=Http2ProtocolOptions(max_concurrent_streams=MAX_STREAMS),
        # Neither limit counts the time of the answer.
        request_headers_timeout=timedelta(seconds=envoy.header_timeout_seconds),
        request_timeout=timedelta(seconds=envoy.request_timeout_seconds),
        # The default is 5 min. It would end answers that are not streamed, although the route has no
        # time-out.
        stream_idle_timeout=timedelta(seconds=envoy.stream_idle_timeout_seconds),
        http_filters=[ext_proc, framing.replies(), router()],
        # The picker buffers bodies, but the body of a websocket never ends. So websockets bypass the picker,
        # by the fallback policy.
        upgrade_configs=[HttpConnectionManagerUpgradeConfig(upgrade_type="websocket", filters=[router()])],
        route_config=routed(STAT_PREFIX, _routes(config)),
        local_reply_config=replies.as_json(),
        access_log=[cut_answers.access_log(), *([_access_log()] if envoy.access_log else [])],
        tracing=tracing.of_requests(envoy.tracing) if envoy.tracing else None,
        request_id_extension=tracing.request_ids() if envoy.tracing else None,
    )


def _strip() -> TypedExtensionConfig:
    mutation = EarlyHeaderMutation(
        mutations=[HeaderMutation(remove=name) for name in (DESTINATION, *SERVER_HEADERS)]
    )
    return TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation", typed_config=AnyMessage.pack(mutation)
    )


def _external_processor(config: Config) -> ExternalProcessor:
    envoy = config.envoy
    return ExternalProcessor(
        # There is no time-out here: it would not end a stream, and the stream lives as long as the answer.
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=PICKER),
            # Inside gRPC's own server nothing else can tell how long a call has waited.
            initial_metadata=[HeaderValue(key=BEGAN, value="%START_TIME(%s.%6f)%")]
            if config.listen.transport == "grpcio"
            else [],
        ),
        processing_mode=ProcessingMode(
            # If Envoy skipped request headers, the router would choose a server before the picker has seen
            # the body.
            request_header_mode=ProcessingModeHeaderSendMode.SEND,
            request_body_mode=ProcessingModeBodySendMode.BUFFERED,
            response_header_mode=ProcessingModeHeaderSendMode.SEND,
            # Answers stay between client and server. The picker asks for the few that it samples.
            response_body_mode=ProcessingModeBodySendMode.NONE,
            request_trailer_mode=ProcessingModeHeaderSendMode.SKIP,
            response_trailer_mode=ProcessingModeHeaderSendMode.SKIP,
        ),
        # Without this, Envoy ignores the picker's request for the body of a sampled answer.
        allow_mode_override=True,
        failure_mode_allow=envoy.fail_open,
        # The default is 500, but the fault is that no picker is there to choose a server.
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        # The default is 200 ms, which would bypass a busy picker. A hung picker costs each request this time.
        message_timeout=timedelta(seconds=envoy.message_timeout_seconds),
        # The picker asks for more time when flow control holds a request. Without this setting Envoy does not
        # obey.
        max_message_timeout=timedelta(seconds=envoy.own_max_message_timeout_s),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, SUBSET_NAMESPACE]),
            # Envoy drops metadata from the picker unless its namespace is listed here.
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE]),
        ),
        # Only this tells the picker which server served after a retry.
        response_attributes=["upstream.address"],
    )


def _routes(config: Config) -> list[Route]:
    """The first match wins: first the paths that clients may not use, then everything else.

    The picker is asked only if a route says so.
    """
    return [*(_blocked(path) for path in config.closed_paths), _to_model_servers(config.envoy)]


def _blocked(path: str) -> Route:
    """404 for paths that begin with `path`. The picker answers the same, but it may be away.

    Envoy cannot compile one expression for all paths.
    """
    return Route(
        match=RouteMatch(prefix=path, case_sensitive=False),
        direct_response=DirectResponseAction(status=BlockedPathError.status),
    )


def _to_model_servers(envoy: EnvoyConfig) -> Route:
    return Route(
        match=RouteMatch(prefix="/"),
        # A larger body gets 413. The limit is here and not on the listener, because the listener's limit also
        # bounds how much of an answer Envoy holds for a slow reader.
        request_body_buffer_limit=envoy.max_body_bytes,
        typed_per_filter_config={EXT_PROC: AnyMessage.pack(FilterConfig(config=AnyMessage.pack(_asked())))},
        route=RouteAction(
            cluster=MODEL_SERVERS,
            # The default is 15 s for the whole answer.
            timeout=timedelta(0),
            retry_policy=RetryPolicy(
                # `reset` and not `reset-before-request`, so that a server that was killed after it took the
                # request counts, too. Nothing is retried once response headers came.
                retry_on="connect-failure,refused-stream,reset,retriable-status-codes",
                retriable_status_codes=[503],
                # Only a few retries, because otherwise one request that kills its server would visit all
                # servers.
                num_retries=envoy.num_retries,
                retry_back_off=RetryPolicyRetryBackOff(
                    base_interval=timedelta(milliseconds=10), max_interval=timedelta(milliseconds=100)
                ),
            ),
        ),
    )


def _asked() -> ExtProcPerRoute:
    """With the settings of the listener."""
    return ExtProcPerRoute(overrides=ExtProcOverrides())


def _access_log() -> AccessLog:
    log = StdoutAccessLog(
        log_format=SubstitutionFormatString(
            json_format=Struct.from_dict(dict(ACCESS_LOG_FIELDS)),
        )
    )
    return AccessLog(name="envoy.access_loggers.stdout", typed_config=AnyMessage.pack(log))
