"""Defines the routing policy: the `spec` of a PrefixRoutingPolicy object, from a file or from Kubernetes.

Every default of routing is here. The structs are frozen: a changed policy is a new object, and code that
holds the old object finishes its work with it. Units are in the names. The reference page and the Kubernetes
schema are generated from these structs.
"""

from collections.abc import Iterator
from functools import cache, cached_property
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from epp.base.errors import ConfigError
from epp.config.dialects import MOST_DESTINATIONS
from epp.config.flow import Flow
from epp.config.reading import Ratio, Strict, decode, in_words


class Gain(Strict, frozen=True):
    """When the expected saving is too small, a pick ignores cached prefixes."""

    min_match_tokens: Annotated[int, Meta(ge=0, le=10**7)] = 64
    """Ignore cached prefixes if the longest one has fewer tokens than this."""
    min_match_ratio: Ratio = 0.0
    """Ignore cached prefixes if the longest one is a smaller share of the prompt than this."""


class LoadSettings(Strict, frozen=True):
    """A pick leaves out every endpoint that is over one of these thresholds, as long as another endpoint
    remains.
    """

    max_waiting: Annotated[int, Meta(ge=0, le=10**6)] = 128
    """Largest number of requests that may wait in the queue of a server, by its metrics. A server with more
    is over this threshold."""
    max_kv_usage: Ratio = 1.0
    """Largest share of a server's KV cache that running requests may hold. 1 means no limit. This is best in
    most fleets: with a limit, another server would have to compute the prefixes that the full server has
    cached, and would fill up next."""
    max_undone_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Largest number of prompt tokens that may wait to be computed on an endpoint. 0 means no limit."""
    when_saturated: Literal["LeastLoaded", "Reject"] = "LeastLoaded"
    """What to do when every endpoint is over a threshold. LeastLoaded: send the request anyway. Reject:
    answer 429."""
    retry_after_seconds: Annotated[int, Meta(ge=1, le=3600)] = 1
    """Value of the Retry-After header of a 429 answer."""


class FailureSettings(Strict, frozen=True):
    """A server whose answers fail gets a higher cost. If it fails too often it is ejected, and comes back
    when trial requests succeed.
    """

    share_to_eject: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """A server is ejected when this share of its recent answers has failed (5xx, 429, connections that broke
    before the answer, or answers that broke off midway), and when it fails more than the other servers do.
    Four failures in a row reach 0.5."""
    max_ejected_share: Ratio = 0.5
    """At most this share of the candidates is ejected because of failures. 0: no server is ever ejected."""
    cost_seconds: Annotated[float, Meta(ge=0, le=600)] = 1.0
    """Cost of a failed answer in the least-cost score, in seconds. The score of a server grows by this, times
    the share of its recent answers that failed."""
    trial_seconds: Annotated[float, Meta(gt=0, le=600)] = 2.0
    """Shortest time between two trial requests, and between two probes, to an ejected server. Where
    requests are few, a trial comes after four times as long, unless a probe has just failed."""
    probe: bool = True
    """The picker itself asks a server that has failed for one token (POST /v1/completions), to learn sooner
    than from clients' requests whether it fails and when it has recovered."""
    hang_seconds: Annotated[float, Meta(ge=0, le=600)] = 1.0
    """A server may hang if requests are open there and nothing moves for this time and for twice the time
    that its queue explains (docs/failing-servers.md). 0 means that the picker does not look for hanging
    servers."""
    share_to_leave_out: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The former name of `shareToEject`. It works until 0.3.0."""
    max_left_out_share: Ratio | None = None
    """The former name of `maxEjectedShare`. It works until 0.3.0."""

    def __post_init__(self) -> None:
        if self.share_to_leave_out is not None:
            force_setattr(self, "share_to_eject", self.share_to_leave_out)
        if self.max_left_out_share is not None:
            force_setattr(self, "max_ejected_share", self.max_left_out_share)

    def former_names(self) -> Iterator[str]:
        """Yield a warning for each field that is set by its former name."""
        for value, former, new in (
            (self.share_to_leave_out, "shareToLeaveOut", "shareToEject"),
            (self.max_left_out_share, "maxLeftOutShare", "maxEjectedShare"),
        ):
            if value is not None:
                yield f"failures.{former}: its name is {new}; write that, since 0.3.0 refuses the former name"


class Lora(Strict, frozen=True):
    """LoRA adapters. Requests prefer endpoints that have their adapter loaded."""

    slots_per_endpoint: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Number of adapters that a server can hold at once, if its metrics do not state it."""
    load_seconds: Annotated[float, Meta(ge=0, le=600)] = 0.5
    """T: extra time to first token, in seconds, when the adapter has to be loaded first. The time counts
    twice if another adapter has to be dropped for it."""


class Cost(Strict, frozen=True):
    """Weights of the least-cost rule. The score is in seconds, and the smallest one wins:
    B / V + (U / V + T) (w + k L + a min(B / V, 0.5 s)). B are the prompt tokens that an endpoint has to
    compute before this prompt, U those of this prompt that it has not cached, L its requests in flight, a the
    requests that come to each endpoint in a second. A token counts twice if it stands behind 65,536 others,
    because of its attention.
    """

    uncached_token_weight: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """w: price of computing one prompt token. A value above 1 favors endpoints that hold the prefix."""
    stalled_request_weight: Annotated[float, Meta(ge=0, le=100)] = 0.15
    """k: extra price of a prompt token for each request in flight on the endpoint, because prefill delays
    their answers."""
    prefill_tokens_per_second: Annotated[float, Meta(gt=0, le=10**7)] = 8000.0
    """V: the prefill rate that the picker assumes until it has learned the real rate. A change applies only
    to models that the picker has not seen yet."""


class PrefixHashSettings(Strict, frozen=True):
    """Settings of the rule `prefix-hash`: consistent hashing of a prompt's beginning, with bounded loads."""

    size_bytes: Annotated[int, Meta(ge=16, le=1_048_576)] = 1024
    """Prompts whose first bytes are equal go to the same endpoint. This is the number of bytes. It is rounded
    down to whole chunks, but to one chunk at least."""
    max_load_ratio: Annotated[float, Meta(ge=1, le=100)] = 1.25
    """If an endpoint has more requests in flight than this many times the mean, its new requests go to the
    next endpoint."""
    min_in_flight: Annotated[int, Meta(ge=1, le=100_000)] = 4
    """An endpoint with fewer requests in flight than this keeps all prompts that are assigned to it, whatever
    the mean is."""


class Chunks(Strict, frozen=True, dict=True):
    """A prompt is cut into chunks before hashing. A change of their sizes empties the prefix table, because
    old hashes no longer match.
    """

    size_bytes: Annotated[int, Meta(ge=16, le=65536)] = 256
    """Size of a chunk at the start of a prompt, in bytes of UTF-8."""
    later_size_bytes: Annotated[int, Meta(ge=16, le=65536)] = 1024
    """Size of the later chunks of a prompt, in bytes of UTF-8. They may be larger, since precision matters
    less there."""
    later_from_bytes: Annotated[int, Meta(ge=0, le=2**30)] = 16384
    """Position in the prompt, in bytes, from which the larger chunks (`laterSizeBytes`) are used."""

    @cached_property
    def early(self) -> int:
        """The number of chunks of the first size. The last of them may end after `later_from_bytes`."""
        return -(-self.later_from_bytes // self.size_bytes)


class Table(Strict, frozen=True):
    """The prefix table: an approximate copy of what the prefix caches of the servers hold."""

    max_entries: Annotated[int, Meta(ge=1000, le=10**8)] = 1_000_000
    """Largest number of entries in the table. Each pair of a server and a chunk is one entry. An entry takes
    about 10 bytes of memory with long prompts, and 450 bytes with prompts of one chunk."""
    default_capacity_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 200_000
    """Cache size in tokens that the picker assumes for a server whose metrics do not state it."""
    bytes_per_token: Annotated[float, Meta(gt=0.1, le=64)] = 4.0
    """Bytes of prompt text for each token, until the picker has learned this number. A change applies only to
    models that the picker has not seen yet."""


class Scrape(Strict, frozen=True):
    """The picker reads the metrics pages of the servers. No pick waits for a scrape."""

    path: Annotated[str, Meta(pattern="^/", max_length=256)] = "/metrics"
    """Path of the metrics page."""
    interval_seconds: Annotated[float, Meta(ge=0.05, le=60)] = 0.5
    """Time from one scrape of an endpoint to the next, varied at random by a tenth. The picker reads at most
    200 pages a second, so a larger fleet is read less often: but no server less often for this reason than
    each second, or twice within `staleAfterSeconds`."""
    idle_interval_seconds: Annotated[float, Meta(ge=0.05, le=60)] = 4.0
    """Time from one scrape to the next of an idle endpoint: no request runs or waits there, and the picker
    has none in flight there. Within a second of sending a request there, the picker scrapes the endpoint at
    `intervalSeconds` again. A value below `intervalSeconds` has no effect."""
    timeout_seconds: Annotated[float, Meta(ge=0.05, le=60)] = 1.0
    """A scrape that takes longer than this counts as failed."""
    stale_after_seconds: Annotated[float, Meta(ge=0.1, le=600)] = 5.0
    """The picker ignores metrics older than this and counts only the requests that it sent itself."""
    failures_to_eject: Annotated[int, Meta(ge=1, le=100)] = 3
    """After this many failed scrapes in a row, an endpoint gets no requests; after one before its first page,
    if others can take them."""


class Sampling(Strict, frozen=True):
    """For a share of the requests the data plane streams the answer to the picker too. The picker learns from
    these answers.
    """

    share: Ratio = 0.01
    """Share of the requests whose answers are sampled. All other answers never pass through the picker."""


class Disaggregation(Strict, frozen=True):
    """Prefill and decode on different servers (P/D). It takes effect where endpoints have the role `prefill`
    or `both`.
    """

    min_uncached_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 256
    """If fewer tokens of a prompt than this are uncached on the chosen endpoint, this endpoint computes the
    prompt itself. Otherwise the smaller cost decides."""
    kv_bytes_per_token: Annotated[float, Meta(gt=0, le=10**9)] = 131_072.0
    """Size of the KV cache of one token, in bytes: 2 x layers x KV heads x head size x bytes of one number.
    The default fits an 8B model with 32 layers, 8 KV heads of size 128, and 16-bit numbers."""
    transfer_bytes_per_second: Annotated[float, Meta(gt=0, le=10**15)] = 1e10
    """Rate, in bytes per second, at which KV cache is copied from the prefill endpoint to the endpoint that
    answers. The default is 80 Gbit/s."""
    overhead_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.01
    """Fixed cost of using a prefill endpoint, in seconds, for prompts of any length: one more request, and
    the setup of the transfer."""


API_VERSION: Final = "prefix-gateway.dev/v1alpha1"
KIND: Final = "PrefixRoutingPolicy"

RuleName = Literal[
    "least-cost",
    "affinity",
    "prefix-hash",
    "session",
    "least-load",
    "round-robin",
    "random",
]

_TAKEN_HEADERS: Final = frozenset(
    {
        "accept",
        "connection",
        "content-length",
        "content-type",
        "host",
        "te",
        "transfer-encoding",
        "x-gateway-destination-endpoint",
        "x-prefix-gateway-decision",
        "x-request-id",
    }
)
"""These headers are the same on every request, or different on each, or written by the gateway. So none of
them can name a session or ask for a decision.
"""


class TargetRef(Strict, frozen=True):
    """What the policy applies to, in the same namespace: an InferencePool with a picker of its own, or the
    Service of a picker, for all its pools. A policy in a file needs no target.
    """

    name: Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    """Name of the target."""
    group: Literal["inference.networking.k8s.io", ""] | None = None
    """API group of the target. It may be left out."""
    kind: Literal["InferencePool", "Service"] = "InferencePool"
    """Kind of the target. A picker of several pools is targeted by its Service (`kubernetes.service`)."""

    def __post_init__(self) -> None:
        if self.group is not None and (self.group == "") != (self.kind == "Service"):
            raise ValueError(f"group: does not have the kind {self.kind}; leave group out")


class PolicySpec(Strict, frozen=True):
    """The settings by which the picker routes requests."""

    target_ref: TargetRef | None = None
    mode: Literal["Enforce", "DryRun"] = "Enforce"
    """Enforce: route by this policy. DryRun: only record what this policy would pick; requests are routed by
    the last accepted policy, or by the default policy."""
    rule: RuleName = "least-cost"
    """The rule that chooses an endpoint among the candidates."""
    max_destinations: Annotated[int, Meta(ge=1, le=MOST_DESTINATIONS)] = 3
    """Largest number of destinations in the answer to the data plane: the chosen endpoint and its fallbacks,
    best first. A gateway that can read only one address gets one, whatever this value is (`dialect` in the
    configuration)."""
    session_header: Annotated[str, Meta(pattern="^[a-z0-9-]+$", max_length=64)] = "x-session-id"
    """Request header with the name of the session, for the rule `session`."""
    debug_header: Annotated[str, Meta(pattern="^[a-z0-9-]*$", max_length=64)] = ""
    """The answer to a request with this header shows the decision in a response header. Empty turns this off.
    """
    chunks: Chunks = Chunks()
    gain: Gain = Gain()
    load: LoadSettings = LoadSettings()
    failures: FailureSettings = FailureSettings()
    lora: Lora = Lora()
    cost: Cost = Cost()
    prefix_hash: PrefixHashSettings = PrefixHashSettings()
    table: Table = Table()
    scrape: Scrape = Scrape()
    sampling: Sampling = Sampling()
    flow: Flow = Flow()
    disaggregation: Disaggregation = Disaggregation()

    def __post_init__(self) -> None:
        if self.chunks.later_size_bytes < self.chunks.size_bytes:
            raise ValueError(
                "chunks.laterSizeBytes is smaller than chunks.sizeBytes: later chunks may only be larger"
            )
        if self.scrape.stale_after_seconds < self.scrape.interval_seconds:
            raise ValueError(
                "scrape.staleAfterSeconds is smaller than scrape.intervalSeconds: metrics would be stale "
                "between two scrapes"
            )
        for field, header in (
            ("sessionHeader", self.session_header),
            ("debugHeader", self.debug_header),
            ("flow.tenantHeader", self.flow.tenant_header),
        ):
            if header in _TAKEN_HEADERS:
                raise ValueError(
                    f"{field}: `{header}` has another meaning on every request; choose another name"
                )


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The part of a Kubernetes object's metadata that the picker reads. It ignores the rest."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    namespace: str = ""
    generation: int = 0


class Policy(Strict, frozen=True):
    """A PrefixRoutingPolicy object."""

    api_version: Literal["prefix-gateway.dev/v1alpha1"]
    kind: Literal["PrefixRoutingPolicy"]
    metadata: Metadata
    spec: PolicySpec = PolicySpec()


_fields_of = cache(msgspec.structs.fields)  # it evaluates annotations, which takes longer than all the rest


def only_set(spec: msgspec.Struct) -> dict[str, object]:
    """Return the fields of a spec that differ from their defaults, as JSON values."""
    found: dict[str, object] = {}
    for one in _fields_of(type(spec)):
        value, factory = getattr(spec, one.name), one.default_factory
        if value != (one.default if factory is msgspec.NODEFAULT else factory()):
            inner = isinstance(value, msgspec.Struct)
            found[one.encode_name] = only_set(value) if inner else msgspec.to_builtins(value)
    return found


def check_spec(spec: object) -> PolicySpec:
    """Check a spec given as JSON values, as if it were in a file. The ConfigError names the field at
    fault.
    """
    try:
        return msgspec.convert(spec, type=PolicySpec)
    except ValueError as error:
        raise ConfigError(in_words(error, of=PolicySpec, under="spec")) from error


def load_policy(text: str | bytes, *, source: str) -> Policy:
    """Decode and check one policy document. Raise ConfigError, which names `source` and the field at
    fault.
    """
    try:
        policy: Policy = decode(text, kind=Policy)
    except ValueError as error:
        raise ConfigError(f"{source}: {in_words(error, of=Policy, text=text)}") from error
    return policy


DEFAULT_POLICY = Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name="default"))
