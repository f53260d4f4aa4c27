"""Defines the `envoy` section of the configuration, which `epp.config.settings` reads."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from epp.config.listening import Tls
from epp.config.strict import Strict

_OWN_MAX_MESSAGE_TIMEOUT_S: Final = 60.0


class EnvoyTracing(Strict, frozen=True):
    """Spans of Envoy itself, sent to a collector of OpenTelemetry. The spans of the picker are then their
    children.
    """

    collector: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
            max_length=263,
        ),
    ]
    """`host:port` of the collector. The collector must accept OTLP over gRPC without TLS there."""
    service_name: Annotated[str, Meta(min_length=1, max_length=253)] = "prefix-gateway-envoy"
    """Service name in the spans of Envoy."""
    sample_percent: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Percentage of the traces that begin at Envoy to sample. A request that arrives with a trace context is
    sampled if this context says so."""

    @property
    def address(self) -> tuple[str, int]:
        """Return the host, without brackets, and the port."""
        host, _, port = self.collector.rpartition(":")
        return host.strip("[]"), int(port)


class Envoy(Strict, frozen=True):
    """Settings that `epp envoy-config` writes into Envoy's bootstrap, and the file with the endpoints."""

    listen: str = "0.0.0.0:8080"
    """`ip:port` for clients of the gateway."""
    admin: str = "127.0.0.1:9901"
    """`ip:port` of the admin page of Envoy."""
    status: str = ""
    """`ip:port` where Envoy serves only `/ready` and `/stats/prometheus`, for probes and Prometheus. Empty
    means that Envoy does not serve them there."""
    eds_file: str = ""
    """File that the picker writes and from which Envoy reads the endpoints. Empty means no file."""
    max_body_bytes: Annotated[int, Meta(ge=65536, le=2**30)] = 32 * 2**20
    """A request with a larger body gets 413."""
    fail_open: bool = True
    """While the picker cannot be reached, route round robin instead of failing requests."""
    message_timeout_seconds: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """Longest time that Envoy waits for an answer of the picker."""
    max_message_timeout_seconds: Annotated[float, Meta(ge=0, le=3600)] | None = None
    """Longest time that the picker may ask the gateway to wait for a pick. It limits how long flow control
    can hold a request whose body is buffered (docs/flow-control.md). null means 60 with the Envoy of `epp
    envoy-config`, and 0 with any other gateway. 0 means that the picker does not ask. With another gateway,
    set this to the time that the gateway allows."""
    stream_idle_timeout_seconds: Annotated[float, Meta(ge=0, le=86400)] = 3600.0
    """Envoy ends a stream that is silent for this long. 0 means that Envoy ends no silent stream."""
    extra_http_filters: Annotated[tuple[dict[str, Any], ...], Meta(max_length=16)] = ()
    """HTTP filters of Envoy that see a request before the picker does, for API keys, JWT or rate limits
    (docs/security.md). Write each filter as in Envoy's own configuration. Each needs a `name`."""
    header_timeout_seconds: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """A request whose header fields are not complete after this time gets 408."""
    request_timeout_seconds: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """A request whose body is not complete after this time gets 408. This does not limit the time of the
    answer."""
    max_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Envoy closes connections of clients above this number at once."""
    max_heap_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**30
    """When the memory of Envoy comes near this size, Envoy ends the largest requests, then refuses new ones
    with 503. Set this to four fifths of the memory that Envoy may use. 0 means no limit."""
    num_retries: Annotated[int, Meta(ge=0, le=10)] = 1
    """How often Envoy tries the next endpoint of the answer when an endpoint cannot be reached, breaks the
    connection or answers 503. A request that ends the servers that read it can end one more than this. If
    this is 1, the picker allows two while some server fails."""
    tls: Tls | None = None
    access_log: bool = True
    """Write a line for each request to standard output, as JSON."""
    tracing: EnvoyTracing | None = None

    @property
    def own_max_message_timeout_s(self) -> float:
        """Return how much time the bootstrap of `epp envoy-config` allows the picker to ask for."""
        asked_s = self.max_message_timeout_seconds
        return _OWN_MAX_MESSAGE_TIMEOUT_S if asked_s is None else asked_s
