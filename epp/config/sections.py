"""Defines sections of the configuration, which `epp.config.settings` reads: the addresses at which the picker
listens for Envoy and for people, with their certificates, `kubernetes`, `exactMode` and `envoy`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from epp.base.types import Address
from epp.config.reading import Strict

_NAME: Final = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_NAME_OR_NONE: Final = f"^({_NAME})?$"
DnsName = Annotated[str, Meta(min_length=1, max_length=253, pattern=f"^{_NAME}$")]


class Tls(Strict, frozen=True):
    """Certificates as PEM files. They are read at start and again when they change. Replace a file by
    renaming another file over it, because Envoy notices no other change.
    """

    cert_file: str
    """File with the certificate, followed by the intermediate certificates."""
    key_file: str
    """File with the private key of the certificate."""
    client_ca_file: str = ""
    """CA file. If set, clients must show a certificate that this CA has signed (mTLS)."""
    ca_file: str = ""
    """Only in `listen.tls`: file with the CA by which Envoy verifies the picker. Empty means `certFile`
    itself."""


class Listen(Strict, frozen=True):
    """The address at which the picker listens for Envoy."""

    address: str = "127.0.0.1:9002"
    """`ip:port`, or `unix:/path`. Each worker has an address of its own: the next port, or the path with `.N`
    added. Envoy may run as another user, so everybody may write to a socket: restrict access by the
    permissions of its directory."""
    transport: Literal["http2", "grpcio"] = "http2"
    """Server that carries the ext_proc streams. http2: the picker's own HTTP/2, on the event loop. grpcio:
    the server of the library grpcio, which takes two to three times the CPU, has no TLS, and does not notice
    that the picker is overloaded.
    """
    tls: Tls | None = None
    health_address: str = ""
    """`ip:port` of gRPC health without TLS, for probes that know no certificates. Empty: health is answered
    at `address` only. Needs the transport http2 and one worker."""

    def addresses(self, *, workers: int) -> tuple[str, ...]:
        """Return the address at which each worker listens. A single worker listens at `address` itself."""
        if self.address.startswith("unix:"):
            return tuple(f"{self.address}.{n}" for n in range(workers)) if workers > 1 else (self.address,)
        return tuple(map(str, consecutive(self.address, workers)))

    def faults(self, *, workers: int) -> Iterator[str]:
        """Yield what the types cannot check. Each text begins with the field at fault."""
        unix = self.address.startswith("unix:")
        if self.health_address and (self.transport != "http2" or workers > 1):
            yield "listen.healthAddress: needs listen.transport: http2 and workers: 1"
        if unix and not self.address.startswith("unix:/"):
            yield "listen.address: a unix socket needs an absolute path, unix:/run/epp.sock"
        if unix and self.tls:
            yield "listen.tls: a unix socket has no TLS; remove it or listen on ip:port"
        if self.tls and self.transport == "grpcio":
            yield "listen.transport: grpcio has no TLS; remove it, and http2 is used"


class Admin(Strict, frozen=True):
    """Address of metrics, health and decisions. Do not expose it to clients of the gateway."""

    address: str = "127.0.0.1:9090"
    """`ip:port`. Worker N listens on port + N."""
    hosts: Annotated[tuple[DnsName, ...], Meta(max_length=64)] = ()
    """DNS names by which clients may ask for the admin pages. IP addresses and `localhost` are always
    allowed. A request for any other name gets 421."""


def consecutive(text: str, count: int) -> tuple[Address, ...]:
    """Return `count` addresses from `ip:port` on. Raise ValueError if the last port is too high."""
    first = Address.parse(text)
    if first.port + count - 1 > 65535:
        raise ValueError(
            f"{first}: {count} workers need {count} consecutive ports from this one on, and the highest port is 65535"
        )
    return tuple(Address(host=first.host, port=first.port + n) for n in range(count))


LlmdGroup = Literal["llm-d.ai", "inference.networking.x-k8s.io"]
"""An API group of llm-d's objects. The newer group is first."""
_LabelKey = Annotated[str, Meta(min_length=1, max_length=317, pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./]*$")]
_LabelValue = Annotated[str, Meta(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]


class Kubernetes(Strict, frozen=True):
    """Read endpoints and policy from a Kubernetes cluster instead of `endpointsFile`."""

    pool: Annotated[str, Meta(max_length=253, pattern=_NAME_OR_NONE)] = ""
    """Name of the InferencePool whose pods are the endpoints. Policies name this pool in `targetRef`. With
    `selector` the pool does not have to exist."""
    pools: Annotated[tuple[DnsName, ...], Meta(max_length=32)] = ()
    """Names of several InferencePools, instead of `pool`. The model in the body of a request decides which of
    their servers may take it (docs/models.md)."""
    service: Annotated[str, Meta(max_length=253, pattern=_NAME_OR_NONE)] = ""
    """Name of this picker's Service, which a policy for all its pools has in `targetRef`."""
    namespace: Annotated[str, Meta(max_length=63)] = ""
    """Namespace of the pool, its pods and policies. Empty means the namespace of the picker."""
    selector: Annotated[dict[_LabelKey, _LabelValue], Meta(max_length=16)] = {}
    """Labels of the pods, for clusters without InferencePools. Empty means the selector of the pool."""
    target_ports: Annotated[tuple[Annotated[int, Meta(ge=1, le=65535)], ...], Meta(max_length=8)] = ()
    """Ports of the pods, together with `selector`. Each port is an endpoint of its own."""
    kubeconfig: str = ""
    """Kubeconfig file to reach the cluster with. Empty means the service account of the pod."""
    objectives: Annotated[tuple[LlmdGroup, ...], Meta(max_length=2)] = ()
    """API groups of the InferenceObjectives that give requests a priority for flow control. The cluster needs
    the CRDs of these groups."""
    rewrites: Annotated[tuple[LlmdGroup, ...], Meta(max_length=2)] = ()
    """API groups of the InferenceModelRewrites that give models other names (docs/models.md). The cluster
    needs the CRDs of these groups."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the pools in order of precedence. A configuration that was checked has at least one."""
        return self.pools or (self.pool,)

    def faults(self) -> Iterator[str]:
        """Yield what the types cannot check. Each text begins with the field at fault."""
        if bool(self.pool) == bool(self.pools):
            yield "kubernetes.pool: set either this or kubernetes.pools"
        if len(set(self.pools)) < len(self.pools):
            yield "kubernetes.pools: a name is listed twice; remove one of the two"
        if self.selector and self.pools:
            yield "kubernetes.selector: works only with kubernetes.pool, because one selector may choose the pods of several models"
        if bool(self.selector) != bool(self.target_ports):
            yield "kubernetes.selector: needs kubernetes.targetPorts; set both, or set neither to follow the InferencePool"


class ExactModel(Strict, frozen=True):
    """Describes how the servers of one base model turn prompts into tokens and name their blocks."""

    tokenizer_folder: Annotated[str, Meta(min_length=1)]
    """Folder with the model's `tokenizer.json`, `tokenizer_config.json` and chat template."""
    model: Annotated[str, Meta(max_length=1024)] = ""
    """Base model, as in the `model` of the endpoints. Empty means every other model."""
    chat_template_file: str = ""
    """The file that the servers use with `--chat-template`. Empty means that they do not use this option."""
    chat_template_arguments: dict[str, Any] = {}
    """The value that the servers have for `--default-chat-template-kwargs`, if any."""
    hash_seed: Annotated[str, Meta(max_length=1024)] = ""
    """PYTHONHASHSEED of the servers. Empty means that they do not set it."""
    adapters: Annotated[dict[str, str], Meta(max_length=4096)] = {}
    """Path from which the servers load each LoRA adapter, by adapter name. The servers use this path in the
    names of the adapter's blocks."""


_Port = Annotated[int, Meta(ge=0, le=65535)]


class ExactMode(Strict, frozen=True):
    """Follow the KV events of the servers, so that the prefix table shows what they really hold. See
    docs/exact-mode.md.
    """

    models: Annotated[tuple[ExactModel, ...], Meta(min_length=1, max_length=256)]
    events_port: _Port = 5557
    """Port on which servers publish events (ZeroMQ), unless their entry in `endpointsFile` names an address.
    0 means none."""
    replay_port: _Port = 5558
    """Port on which servers replay missed events. 0 means none: after each gap the picker then forgets what
    it knew of the server."""
    topic: Annotated[str, Meta(max_length=255)] = ""
    """Topic of the events."""
    max_blocks: Annotated[int, Meta(ge=1000, le=10**9)] = 2_000_000
    """Largest number of blocks to follow on all servers together. A block takes about 90 bytes of memory."""

    def faults(self) -> Iterator[str]:
        """Yield what the types cannot check. Each text begins with the field at fault."""
        names = [one.model for one in self.models]
        for n, name in enumerate(names):
            if (first := names.index(name)) < n:
                what = repr(name) if name else "every other model"
                yield f"exactMode.models[{n}].model: models[{first}] is for {what} too; remove one of the two"
        if self.events_port and self.events_port == self.replay_port:
            yield "exactMode.replayPort: events and replay need two different ports"


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
    """While the picker cannot be reached, route round robin instead of failing requests. Write false for any
    gateway that fails closed: the picker then ends each of its streams at the response headers, because all
    answers in flight would break off when it dies, and learns the load from scrapes."""
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

    def faults(self) -> Iterator[str]:
        """Yield what the types cannot check. Each text begins with the field at fault."""
        if self.tracing is not None and not 0 < self.tracing.address[1] < 65536:
            yield f"envoy.tracing.collector: {self.tracing.collector}: the highest port is 65535"
        for n, extra in enumerate(self.extra_http_filters):
            if not isinstance(extra.get("name"), str):
                yield f"envoy.extraHttpFilters[{n}]: has no name; write the filter as Envoy's http_filters do"
