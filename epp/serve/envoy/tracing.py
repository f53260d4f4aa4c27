"""Makes the settings by which Envoy sends spans: one for each request, one for its call of the picker, and
one for each attempt at a model server. Pure.

The call of the picker carries the trace context in its gRPC metadata, so that the picker's span is a child of
Envoy's span. `client_listener` and `bootstrap` call this module.
"""

from __future__ import annotations

from typing import Any

from epp.config.envoy import EnvoyTracing
from epp.serve.envoy.clusters import speaking_http2, static
from epp.serve.envoy.messages import Message, extension, grpc_to, socket_address, typed
from epp.serve.envoy.names import COLLECTOR, PATH


def of_requests(settings: EnvoyTracing) -> Message:
    """Return the fields of the connection manager."""
    share = {"numerator": round(settings.sample_percent * 10_000), "denominator": "MILLION"}
    ratio = _sampler("trace_id_ratio_based", "TraceIdRatioBasedSamplerConfig", sampling_percentage=share)
    return {
        "tracing": {
            "provider": extension(
                "tracers.opentelemetry",
                "config.trace.v3.OpenTelemetryConfig",
                grpc_service=grpc_to(COLLECTOR),
                service_name=settings.service_name,
                # Envoy's own `random_sampling` would overrule the caller's context.
                sampler=_sampler("parent_based", "ParentBasedSamplerConfig", wrapped_sampler=ratio),
            ),
            # Otherwise one span would stand for both sides, and retries would not appear.
            "spawn_upstream_span": True,
            # This replaces Envoy's own tag, which has the query.
            "custom_tags": [{"tag": "http.url", "value": f"%REQ(:SCHEME)%://%REQ(:AUTHORITY)%{PATH}"}],
        },
        # By default a request without a UUID as id is never traced, and the UUID of others is changed.
        "request_id_extension": {
            "typed_config": typed(
                "extensions.request_id.uuid.v3.UuidRequestIdConfig",
                pack_trace_reason=False,
                use_request_id_for_trace_sampling=False,
            )
        },
    }


def collector(settings: EnvoyTracing) -> Message:
    host, port = settings.address
    return {**static(COLLECTOR, [socket_address(host, port)], **speaking_http2()), "type": "STRICT_DNS"}


def _sampler(name: str, kind: str, **settings: Any) -> Message:
    return extension(
        f"tracers.opentelemetry.samplers.{name}",
        f"extensions.tracers.opentelemetry.samplers.v3.{kind}",
        **settings,
    )
