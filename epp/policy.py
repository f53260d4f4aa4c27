"""The routing policy: the `spec` of a PrefixRoutingPolicy object, from a file or from Kubernetes.

Owns every default of routing. The structs are frozen; a changed policy is a new object, and whoever holds the old
one finishes with it. Units are in the names. The reference page and the Kubernetes schema are generated from here.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from epp.errors import ConfigError
from epp.yaml_faults import in_words

API_VERSION: Final = "prefix-gateway.dev/v1alpha1"
KIND: Final = "PrefixRoutingPolicy"

RuleName = Literal["least-cost", "affinity", "round-robin", "random", "least-load", "power-of-two", "session"]

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
"""The same on every request, or different on each, or written by the gateway: none of them names a session or asks for a decision."""

Ratio = Annotated[float, Meta(ge=0, le=1)]


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Common settings of every policy struct: frozen, camelCase, unknown fields refused."""


class Chunks(_Spec, frozen=True):
    """How a prompt is cut before hashing. A change starts the table anew: old hashes mean nothing then."""

    size_bytes: Annotated[
        int, Meta(ge=16, le=65536, description="Size of a chunk at the start of a prompt, in bytes of UTF-8.")
    ] = 256
    later_size_bytes: Annotated[
        int, Meta(ge=16, le=65536, description="Size of a chunk further on, where precision matters less.")
    ] = 1024
    later_from_bytes: Annotated[
        int, Meta(ge=0, le=2**30, description="Where the larger chunks begin: a position, never a length.")
    ] = 16384


class Gain(_Spec, frozen=True):
    """When the expected saving is too small to bother: prefixes are then ignored for that pick."""

    min_match_tokens: Annotated[
        int, Meta(ge=0, le=10**7, description="A best match under this many tokens is ignored.")
    ] = 64
    min_match_ratio: Annotated[
        Ratio, Meta(description="A best match under this share of the prompt is ignored.")
    ] = 0.0


class Load(_Spec, frozen=True):
    """Endpoints over a threshold are left out while any other remains."""

    max_waiting: Annotated[
        int, Meta(ge=0, le=10**6, description="Requests waiting in the server's queue, scraped.")
    ] = 128
    max_kv_usage: Annotated[
        Ratio,
        Meta(
            description="Share of the KV cache held by running requests; 1: no limit, since what a full server has cached "
            "would be computed elsewhere, and fill the next one."
        ),
    ] = 1.0
    max_undone_tokens: Annotated[
        int, Meta(ge=0, le=10**9, description="Prompt tokens sent there and not yet computed; 0: no limit.")
    ] = 0
    when_saturated: Annotated[
        Literal["LeastLoaded", "Reject"],
        Meta(description="What to do when every endpoint is over: send anyway, or answer 429."),
    ] = "LeastLoaded"
    retry_after_seconds: Annotated[int, Meta(ge=1, le=3600, description="Retry-After of a 429.")] = 1


class Lora(_Spec, frozen=True):
    """Adapters: requests stay where their adapter is loaded."""

    slots_per_endpoint: Annotated[
        int, Meta(ge=1, le=1024, description="Adapters a server holds at once where its metrics do not say.")
    ] = 4
    load_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="T: time to load an adapter, priced as prefill; more where it drops another one.",
        ),
    ] = 0.5


class Cost(_Spec, frozen=True):
    """Weights of the least-cost rule, in seconds, the least wins: score = (B + (U + T V) (w + k L) + c L) / V."""

    uncached_token_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="w: price of computing one token of this prompt; above 1 holds on to what is cached.",
        ),
    ] = 1.0
    stalled_request_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="k: what it costs more for each request in flight, whose answer it delays.",
        ),
    ] = 0.15
    running_request_tokens: Annotated[
        float, Meta(ge=0, le=10**6, description="c: price of one request in flight, as prompt tokens.")
    ] = 50.0
    prefill_tokens_per_second: Annotated[
        float,
        Meta(
            gt=0,
            le=10**7,
            description="V before a rate is learned; a change counts for models not seen before.",
        ),
    ] = 8000.0


class Tiers(_Spec, frozen=True):
    """What a prefix in a server's slower tiers is worth. Only exact mode knows of tiers: docs/exact-mode.md."""

    cpu_share: Annotated[
        Ratio, Meta(description="Tokens held in CPU memory count as this share of tokens held on the GPU.")
    ] = 0.9
    storage_share: Annotated[Ratio, Meta(description="The same, of tokens held in storage.")] = 0.5

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of GPU, CPU and STORAGE, in this order."""
        return 1.0, self.cpu_share, self.storage_share


class Table(_Spec, frozen=True):
    """The approximate mirror of the servers' prefix caches."""

    max_entries: Annotated[
        int,
        Meta(
            ge=1000,
            le=10**8,
            description="Bound of (server, chunk) pairs: about 10 bytes each for long prompts, 360 for one-chunk prompts.",
        ),
    ] = 1_000_000
    default_capacity_tokens: Annotated[
        int, Meta(ge=0, le=10**9, description="Cache size of a server whose metrics do not say.")
    ] = 200_000
    learn_capacity: Annotated[
        bool,
        Meta(
            description="Correct each cache's size by what the servers' counters say of the predictions: freely where "
            "metrics name no size, else by a quarter."
        ),
    ] = True
    ttl_seconds: Annotated[
        float, Meta(ge=1, le=10**7, description="An entry unused for so long is forgotten.")
    ] = 3600.0
    bytes_per_token: Annotated[
        float,
        Meta(
            gt=0.1,
            le=64,
            description="Bytes of prompt text to a token, before it is learned; a change counts for models not seen before.",
        ),
    ] = 4.0


class Scrape(_Spec, frozen=True):
    """Reading the servers' /metrics, off the pick path."""

    path: Annotated[str, Meta(pattern="^/", max_length=256, description="Where the metrics are.")] = (
        "/metrics"
    )
    interval_seconds: Annotated[
        float, Meta(ge=0.05, le=60, description="Time from one scrape to the next, jittered by a tenth.")
    ] = 1.0
    timeout_seconds: Annotated[
        float, Meta(ge=0.05, le=60, description="A page that takes longer is a failed scrape.")
    ] = 1.0
    stale_after_seconds: Annotated[
        float, Meta(ge=0.1, le=600, description="Older metrics are not believed; own bookings still count.")
    ] = 5.0
    failures_to_eject: Annotated[
        int,
        Meta(ge=1, le=100, description="Scrapes failed in a row before an endpoint leaves the candidates."),
    ] = 3
    max_page_bytes: Annotated[
        int, Meta(ge=1024, le=2**28, description="A larger page is a failed scrape.")
    ] = 4 * 2**20


class Sampling(_Spec, frozen=True):
    """Requests whose answer is streamed to the picker, to learn from."""

    share: Annotated[
        Ratio, Meta(description="Share of requests; the answers of all others never pass here.")
    ] = 0.01
    max_text_bytes: Annotated[
        int, Meta(ge=0, le=2**24, description="Of a sampled answer, what is kept to index the next turn.")
    ] = 262_144


class TargetRef(_Spec, frozen=True):
    """The InferencePool that a policy object is for, in its own namespace. A policy in a file needs none."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=253,
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
            description="Name of the InferencePool.",
        ),
    ]
    group: Annotated[Literal["inference.networking.k8s.io"], Meta(description="API group of the target.")] = (
        "inference.networking.k8s.io"
    )
    kind: Annotated[Literal["InferencePool"], Meta(description="Kind of the target.")] = "InferencePool"


class PolicySpec(_Spec, frozen=True):
    """How requests are routed."""

    target_ref: TargetRef | None = None
    mode: Annotated[
        Literal["Enforce", "DryRun"],
        Meta(
            description="DryRun: score every request and record what would have been picked, while the last "
            "accepted policy, else the default, routes."
        ),
    ] = "Enforce"
    rule: Annotated[RuleName, Meta(description="Which rule chooses among the candidates.")] = "least-cost"
    max_destinations: Annotated[
        int,
        Meta(
            ge=2,
            le=8,
            description="Length of the ordered fallback list handed to Envoy, where there are so many.",
        ),
    ] = 3
    session_header: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9-]+$",
            max_length=64,
            description="Header that names a session, for rule `session`.",
        ),
    ] = "x-session-id"
    debug_header: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9-]*$",
            max_length=64,
            description="A request with it gets its decision in a response header; empty: never.",
        ),
    ] = ""
    chunks: Chunks = Chunks()
    gain: Gain = Gain()
    load: Load = Load()
    lora: Lora = Lora()
    cost: Cost = Cost()
    table: Table = Table()
    tiers: Tiers = Tiers()
    scrape: Scrape = Scrape()
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        if self.chunks.later_size_bytes < self.chunks.size_bytes:
            raise ValueError(
                "chunks.laterSizeBytes is under chunks.sizeBytes: later chunks may only be larger"
            )
        if self.scrape.stale_after_seconds < self.scrape.interval_seconds:
            raise ValueError(
                "scrape.staleAfterSeconds is under scrape.intervalSeconds: metrics would be stale between scrapes"
            )
        for field, header in (("sessionHeader", self.session_header), ("debugHeader", self.debug_header)):
            if header in _TAKEN_HEADERS:
                raise ValueError(
                    f"{field}: `{header}` has another meaning on every request; choose another name"
                )


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The part of a Kubernetes object's metadata that is read; the rest is let pass."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    namespace: str = ""
    generation: int = 0


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A PrefixRoutingPolicy object."""

    api_version: Literal["prefix-gateway.dev/v1alpha1"]
    kind: Literal["PrefixRoutingPolicy"]
    metadata: Metadata
    spec: PolicySpec = PolicySpec()


def check_spec(spec: object) -> PolicySpec:
    """A spec given as JSON values, checked as one in a file is. ConfigError names the field at fault."""
    try:
        return msgspec.convert(spec, type=PolicySpec)
    except (msgspec.MsgspecError, ValueError) as error:
        text = str(error).replace("`$.", "`$.spec.").replace("`$`", "`$.spec`")
        raise ConfigError(text if "`$.spec" in text else f"{text} - at `$.spec`") from error


def load_policy(text: str | bytes, *, source: str) -> Policy:
    """Decode and check one policy document. ConfigError names `source` and the field at fault."""
    try:
        return msgspec.yaml.decode(text, type=Policy)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        hint = f"; rules are {', '.join(get_args(RuleName))}" if "$.spec.rule`" in str(error) else ""
        raise ConfigError(f"{source}: {in_words(error, of=Policy)}{hint}") from error


DEFAULT_POLICY = Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name="default"))
