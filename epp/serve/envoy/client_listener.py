"""Makes the listener of the generated bootstrap: everything from the client's connection to the route.

Pure. Settings whose default would fail unnoticed are set here, each with a comment that says why. `bootstrap`
calls this module.
"""

from __future__ import annotations

from typing import Any, Final

from epp.base.errors import BlockedPathError
from epp.base.types import SERVER_HEADERS
from epp.config.envoy import Envoy as EnvoyConfig
from epp.config.settings import Config
from epp.serve.envoy import cut_answers, error_replies, framing, tls, tracing
from epp.serve.envoy.messages import Message, address, extension, grpc_to, seconds, typed
from epp.serve.envoy.names import (
    DESTINATION,
    LB_NAMESPACE,
    MODEL_SERVERS,
    PATH,
    PICKER,
    STAT_PREFIX,
    SUBSET_NAMESPACE,
)

EXT_PROC: Final = "envoy.filters.http.ext_proc"
_EXT_PROC_TYPES: Final = "extensions.filters.http.ext_proc.v3"

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
    "path": PATH,
    "picked": f"%DYNAMIC_METADATA({LB_NAMESPACE}:{DESTINATION})%",
    "protocol": "%PROTOCOL%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "served_by": "%UPSTREAM_HOST%",
    "status": "%RESPONSE_CODE%",
    "time": "%START_TIME%",
}
"""The access log's fields. If `picked` is empty, the request bypassed the picker."""

MAX_HEADER_FIELDS: Final = 128
"""A client may send 100 fields. Envoy and the picker add up to ten. More fields than this would be an error.
"""

MAX_STREAMS: Final = 100
"""Most HTTP/2 streams of one connection. A client with more streams waits or opens another connection."""


def gateway(config: Config) -> Message:
    """Return the one listener for clients of the gateway."""
    return listening(
        STAT_PREFIX,
        config.envoy.listen,
        manager=_connection_manager(config),
        chain={
            "transport_socket_connect_timeout": seconds(config.envoy.header_timeout_seconds),
            **tls.downstream(config, protocols=["h2", "http/1.1"]),
        },
        # `drain_listeners?inboundonly` then closes this listener and leaves the status page open.
        traffic_direction="INBOUND",
    )


def listening(
    name: str, where: str, *, manager: Message, chain: Message | None = None, **settings: Any
) -> Message:
    """Return a listener with a connection manager. `chain` and `settings` are the other fields of the filter
    chain and of the listener.
    """
    http = extension(
        "filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        **manager,
    )
    return {
        "name": name,
        "address": address(where),
        "filter_chains": [{"filters": [http], **(chain or {})}],
        **settings,
    }


def router() -> Message:
    """Return the last filter: it carries out the route."""
    return extension("filters.http.router", "extensions.filters.http.router.v3.Router")


def routed(name: str, routes: list[Message]) -> Message:
    """Return a connection manager with `routes` for every host."""
    return {"name": name, "virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}]}


def _connection_manager(config: Config) -> Message:
    envoy = config.envoy
    # This filter is off unless a route turns it on. A request that is not valid HTTP has no route. Its error
    # would wait for the picker's answer, and Envoy closes the connection before the answer comes.
    ext_proc = {"name": EXT_PROC, "typed_config": _external_processor(config), "disabled": True}
    return {
        # AUTO also accepts HTTP/2 by prior knowledge in clear text. With TLS, the handshake shows the
        # version.
        "codec_type": "AUTO" if envoy.http2_cleartext or envoy.tls else "HTTP1",
        # A model server reads `/x/%2e%2e/metrics` as `/metrics`. The routes must do the same, or blocked
        # paths would be open.
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        # These headers are removed before any filter runs, so also for requests that bypass the picker. No
        # client may name its server, or a server that its server calls.
        "early_header_mutation_extensions": [_strip()],
        # The gateway is an edge: it does not obey `x-envoy-*` headers of outside clients (retries,
        # time-outs).
        "use_remote_address": True,
        # The caller's request id stays unchanged and is returned, because people find decisions by this id.
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "common_http_protocol_options": {"max_headers_count": MAX_HEADER_FIELDS},
        # Some clients offer an upgrade with every request (TLS, h2c), and some speak HTTP/1.0. Both get their
        # answer.
        "http_protocol_options": {
            "accept_http_10": True,
            "ignore_http_11_upgrade": [{"safe_regex": {"regex": _all_but("websocket")}}],
        },
        "http2_protocol_options": {"max_concurrent_streams": MAX_STREAMS},
        # Neither limit counts the time of the answer.
        "request_headers_timeout": seconds(envoy.header_timeout_seconds),
        "request_timeout": seconds(envoy.request_timeout_seconds),
        # The default is 5 min. It would end answers that are not streamed, although the route has no
        # time-out.
        "stream_idle_timeout": seconds(envoy.stream_idle_timeout_seconds),
        # The operator's filters see a request before the picker does.
        "http_filters": [*envoy.extra_http_filters, ext_proc, framing.replies(), router()],
        # The picker buffers bodies, but the body of a websocket never ends. So websockets bypass the picker,
        # by the fallback policy.
        "upgrade_configs": [
            {"upgrade_type": "websocket", "filters": [*envoy.extra_http_filters, router()]},
        ],
        "route_config": routed(STAT_PREFIX, _routes(config)),
        "local_reply_config": error_replies.as_json(),
        "access_log": [cut_answers.access_log(), *([_access_log()] if envoy.access_log else [])],
        **(tracing.of_requests(envoy.tracing) if envoy.tracing else {}),
    }


def _all_but(word: str) -> str:
    """Return a regular expression for every text but `word`, in any case. RE2 has no negative look-ahead."""
    letters = [f"[{letter}{letter.upper()}]" for letter in word]
    parts = [f"{''.join(letters[:n])}([^{letters[n][1:-1]}].*)?" for n in range(len(word))]
    return "|".join([*parts, f"{''.join(letters)}.+"])


def _strip() -> Message:
    name = "http.early_header_mutation.header_mutation"
    mutations = [{"remove": header} for header in (DESTINATION, *SERVER_HEADERS)]
    return extension(name, f"extensions.{name}.v3.HeaderMutation", mutations=mutations)


def _external_processor(config: Config) -> Message:
    envoy = config.envoy
    # There is no time-out here: it would not end a stream, and the stream lives as long as the answer.
    return typed(
        f"{_EXT_PROC_TYPES}.ExternalProcessor",
        grpc_service=grpc_to(PICKER),
        processing_mode={
            # If Envoy skipped request headers, the router would choose a server before the picker has seen
            # the body.
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SEND",
            # Answers stay between client and server. The picker asks for the few that it samples.
            "response_body_mode": "NONE",
            "request_trailer_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
        # Without this, Envoy ignores the picker's request for the body of a sampled answer.
        allow_mode_override=True,
        failure_mode_allow=envoy.fail_open,
        # The default is 500, but the fault is that no picker is there to choose a server.
        status_on_error={"code": "ServiceUnavailable"},
        # The default is 200 ms, which would bypass a busy picker. A hung picker costs each request this time.
        message_timeout=seconds(envoy.message_timeout_seconds),
        # The picker asks for more time when flow control holds a request. Without this setting Envoy does not
        # obey.
        max_message_timeout=seconds(envoy.own_max_message_timeout_s),
        metadata_options={
            "forwarding_namespaces": {"untyped": [LB_NAMESPACE, SUBSET_NAMESPACE]},
            # Envoy drops metadata from the picker unless its namespace is listed here.
            "receiving_namespaces": {"untyped": [LB_NAMESPACE]},
        },
        # Only these attributes show the picker which server served after a retry, and that servers ended when
        # they had taken a request. The picker forbids retries of such a request by a header of Envoy's.
        response_attributes=["upstream.address", "response.code_details", "upstream.request_attempt_count"],
        mutation_rules={"allow_envoy": True},
    )


def _routes(config: Config) -> list[Message]:
    """Return the routes: first the paths that clients may not use, then everything else. The first match
    wins. The picker is asked only if a route says so.
    """
    blocked = (_blocked(path) for path in config.closed_paths)
    return [*blocked, _websocket_without_get(), _to_model_servers(config.envoy)]


def _websocket_without_get() -> Message:
    """Return a route with 400 for what bypasses the picker as a websocket and is none."""
    headers = [
        {"name": "upgrade", "string_match": {"contains": "websocket", "ignore_case": True}},
        {"name": ":method", "string_match": {"exact": "GET"}, "invert_match": True},
    ]
    return {"match": {"prefix": "/", "headers": headers}, "direct_response": {"status": 400}}


def _blocked(path: str) -> Message:
    """Return a route with 404 for paths that begin with `path`. The picker answers the same, but it may be
    away. Envoy cannot compile one expression for all paths.
    """
    return {
        "match": {"prefix": path, "case_sensitive": False},
        "direct_response": {"status": BlockedPathError.status},
    }


def _to_model_servers(envoy: EnvoyConfig) -> Message:
    # The route turns the filter on, with the settings of the listener.
    asked = typed(f"{_EXT_PROC_TYPES}.ExtProcPerRoute", overrides={})
    return {
        "match": {"prefix": "/"},
        # A larger body gets 413. The limit is here and not on the listener, because the listener's limit also
        # bounds how much of an answer Envoy holds for a slow reader.
        "request_body_buffer_limit": envoy.max_body_bytes,
        "typed_per_filter_config": {EXT_PROC: typed("config.route.v3.FilterConfig", config=asked)},
        "route": {
            "cluster": MODEL_SERVERS,
            # The default is 15 s for the whole answer.
            "timeout": "0s",
            "retry_policy": {
                # `reset` and not `reset-before-request`: a request is also retried if its server was killed
                # after it took the request. Nothing is retried after response headers came. Envoy counts all
                # retries together, so this number also bounds how many servers one request can end.
                "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
                "retriable_status_codes": [503],
                "num_retries": envoy.num_retries,
                "retry_back_off": {"base_interval": "0.01s", "max_interval": "0.1s"},
            },
        },
    }


def _access_log() -> Message:
    log_format = {"json_format": dict(ACCESS_LOG_FIELDS)}
    return extension(
        "access_loggers.stdout", "extensions.access_loggers.stream.v3.StdoutAccessLog", log_format=log_format
    )
