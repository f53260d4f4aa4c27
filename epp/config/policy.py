"""The routing policy: the `spec` of a PrefixRoutingPolicy object, from a file or from Kubernetes.

Owns every default of routing. The structs are frozen; a changed policy is a new object, and whoever holds the old
one finishes with it. Units are in the names. The reference page and the Kubernetes schema are generated from here.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from epp.config.dialects import MOST_DESTINATIONS
from epp.config.disaggregation import Disaggregation
from epp.config.flow import Flow
from epp.config.prefix import Chunks, Table, Tiers
from epp.config.strict import Ratio, Strict
from epp.config.yaml_faults import decode, in_words
from epp.errors import ConfigError

API_VERSION: Final = "prefix-gateway.dev/v1alpha1"
KIND: Final = "PrefixRoutingPolicy"

RuleName = Literal[
    "least-cost",
    "affinity",
    "prefix-hash",
    "session",
    "least-load",
    "power-of-two",
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
"""The same on every request, or different on each, or written by the gateway: none of them names a session or asks for a decision."""


class Gain(Strict, frozen=True):
    """When the expected saving is too small, a pick ignores cached prefixes."""

    min_match_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=10**7,
            description="Ignore cached prefixes if the longest one has fewer tokens than this.",
        ),
    ] = 64
    min_match_ratio: Annotated[
        Ratio,
        Meta(
            description="Ignore cached prefixes if the longest one is a smaller share of the prompt than this."
        ),
    ] = 0.0


class Load(Strict, frozen=True):
    """A pick leaves out endpoints that are over a threshold, as long as another endpoint remains."""

    max_waiting: Annotated[
        int,
        Meta(
            ge=0,
            le=10**6,
            description="Most requests that may wait in the queue of the server, from its metrics.",
        ),
    ] = 128
    max_kv_usage: Annotated[
        Ratio,
        Meta(
            description="Largest share of the KV cache that running requests may hold. 1 means no limit, which is best in most fleets: "
            "prefixes cached on a full server would have to be computed on another one and would fill that one next."
        ),
    ] = 1.0
    max_undone_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=10**9,
            description="Most prompt tokens that may wait to be computed on an endpoint. 0 means no limit.",
        ),
    ] = 0
    when_saturated: Annotated[
        Literal["LeastLoaded", "Reject"],
        Meta(
            description="What to do when every endpoint is over a threshold: send the request anyway, or answer 429."
        ),
    ] = "LeastLoaded"
    retry_after_seconds: Annotated[
        int, Meta(ge=1, le=3600, description="Value of the Retry-After header of a 429 answer.")
    ] = 1


class Failures(Strict, frozen=True):
    """Servers whose answers fail cost more, then are left out, with trial requests to come back."""

    share_to_leave_out: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="A server is left out when this share of its recent answers has failed (5xx, 429, connections that "
            "broke before the answer), and it fails more than the others do. Four failures in a row reach 0.5.",
        ),
    ] = 0.5
    max_left_out_share: Annotated[
        Ratio,
        Meta(
            description="At most this share of the candidates is left out for failures; 0: no server ever is."
        ),
    ] = 0.5
    cost_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="What a failed answer costs in the least-cost score: a server's score grows by its failure share times "
            "this.",
        ),
    ] = 1.0
    trial_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description="Least time between two trial requests to a server that is left out. Where requests are few, a trial "
            "comes after four times as long.",
        ),
    ] = 2.0
    hang_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="A server hangs when its requests wait for their first byte longer than this, than three times what "
            "other servers took, and than its queue explains; 0: never look.",
        ),
    ] = 1.0


class Lora(Strict, frozen=True):
    """LoRA adapters. Requests prefer endpoints that have their adapter loaded."""

    slots_per_endpoint: Annotated[
        int,
        Meta(
            ge=1, le=1024, description="Adapters that a server can hold at once, if its metrics do not say."
        ),
    ] = 4
    load_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="T: extra time to first token when the adapter has to be loaded first, in seconds. Loading counts twice where it drops another adapter.",
        ),
    ] = 0.5


class Cost(Strict, frozen=True):
    """Weights of the least-cost rule. The score is in seconds and the smallest wins: (B + (U + T V) (w + k L) + c L) / V."""

    uncached_token_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="w: price of computing one prompt token. A value above 1 prefers endpoints that hold the prefix.",
        ),
    ] = 1.0
    stalled_request_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="k: extra price of a prompt token for each request in flight on the endpoint, because prefill delays their answers.",
        ),
    ] = 0.15
    running_request_tokens: Annotated[
        float, Meta(ge=0, le=10**6, description="c: price of one request in flight, in prompt tokens.")
    ] = 50.0
    prefill_tokens_per_second: Annotated[
        float,
        Meta(
            gt=0,
            le=10**7,
            description="V, the prefill rate, until the picker has learned it. A change applies to models that the picker has not seen yet.",
        ),
    ] = 8000.0


class PrefixHash(Strict, frozen=True):
    """Settings of the rule `prefix-hash`: consistent hashing of a prompt's beginning, with bounded loads."""

    size_bytes: Annotated[
        int,
        Meta(
            ge=16,
            le=1_048_576,
            description="Prompts with the same first bytes, this many, go to the same endpoint. Rounded down to whole chunks, at least one.",
        ),
    ] = 1024
    max_load_ratio: Annotated[
        float,
        Meta(
            ge=1,
            le=100,
            description="An endpoint with more than this many times the mean of requests in flight passes new requests on to the next one.",
        ),
    ] = 1.25
    min_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="An endpoint with fewer requests in flight than this takes every prompt of its own, whatever the mean.",
        ),
    ] = 4


class Scrape(Strict, frozen=True):
    """Reading the metrics pages of the servers. No pick waits for a scrape."""

    path: Annotated[str, Meta(pattern="^/", max_length=256, description="Path of the metrics page.")] = (
        "/metrics"
    )
    interval_seconds: Annotated[
        float,
        Meta(ge=0.05, le=60, description="Time from one scrape to the next, varied at random by a tenth."),
    ] = 1.0
    idle_interval_seconds: Annotated[
        float,
        Meta(
            ge=0.05,
            le=60,
            description="Time from one scrape to the next of an endpoint where nothing runs or waits and where the picker has no request. "
            "The picker reads the endpoint at `intervalSeconds` again within a second of sending a request there. "
            "Below `intervalSeconds` it has no effect.",
        ),
    ] = 4.0
    timeout_seconds: Annotated[
        float, Meta(ge=0.05, le=60, description="A scrape that takes longer has failed.")
    ] = 1.0
    stale_after_seconds: Annotated[
        float,
        Meta(
            ge=0.1,
            le=600,
            description="The picker ignores metrics older than this and counts only the requests that it sent itself.",
        ),
    ] = 5.0
    failures_to_eject: Annotated[
        int,
        Meta(
            ge=1, le=100, description="Failed scrapes in a row after which an endpoint gets no more requests."
        ),
    ] = 3
    max_page_bytes: Annotated[
        int, Meta(ge=1024, le=2**28, description="A scrape whose page is larger has failed.")
    ] = 4 * 2**20


class Sampling(Strict, frozen=True):
    """For a share of the requests the answer is streamed to the picker too, which learns from it."""

    share: Annotated[
        Ratio, Meta(description="Share of the requests. All other answers never pass through the picker.")
    ] = 0.01
    max_text_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=2**24,
            description="Bytes of a sampled answer that are kept, to record the prefix of the next turn.",
        ),
    ] = 262_144


class TargetRef(Strict, frozen=True):
    """The InferencePool that the policy applies to, in the same namespace. A policy in a file needs none."""

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


class PolicySpec(Strict, frozen=True):
    """How the picker routes requests."""

    target_ref: TargetRef | None = None
    mode: Annotated[
        Literal["Enforce", "DryRun"],
        Meta(
            description="Enforce: route by this policy. DryRun: only record what this policy would have picked, while the last accepted "
            "policy (or the default) routes."
        ),
    ] = "Enforce"
    rule: Annotated[RuleName, Meta(description="The rule that chooses among the candidates.")] = "least-cost"
    max_destinations: Annotated[
        int,
        Meta(
            ge=1,
            le=MOST_DESTINATIONS,
            description="Most destinations in the answer to the data plane: the choice and its fallbacks, best first. "
            "A gateway that reads a single address gets one, whatever stands here (`dialect` in the configuration).",
        ),
    ] = 3
    session_header: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9-]+$",
            max_length=64,
            description="Request header with the name of the session, for the rule `session`.",
        ),
    ] = "x-session-id"
    debug_header: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9-]*$",
            max_length=64,
            description="A request with this header gets its decision in a response header. Empty turns this off.",
        ),
    ] = ""
    chunks: Chunks = Chunks()
    gain: Gain = Gain()
    load: Load = Load()
    failures: Failures = Failures()
    lora: Lora = Lora()
    cost: Cost = Cost()
    prefix_hash: PrefixHash = PrefixHash()
    table: Table = Table()
    tiers: Tiers = Tiers()
    scrape: Scrape = Scrape()
    sampling: Sampling = Sampling()
    flow: Flow = Flow()
    disaggregation: Disaggregation = Disaggregation()

    def __post_init__(self) -> None:
        if self.chunks.later_size_bytes < self.chunks.size_bytes:
            raise ValueError(
                "chunks.laterSizeBytes is under chunks.sizeBytes: later chunks may only be larger"
            )
        if self.scrape.stale_after_seconds < self.scrape.interval_seconds:
            raise ValueError(
                "scrape.staleAfterSeconds is under scrape.intervalSeconds: metrics would be stale between scrapes"
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
    """The part of a Kubernetes object's metadata that is read; the rest is let pass."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    namespace: str = ""
    generation: int = 0


class Policy(Strict, frozen=True):
    """A PrefixRoutingPolicy object."""

    api_version: Literal["prefix-gateway.dev/v1alpha1"]
    kind: Literal["PrefixRoutingPolicy"]
    metadata: Metadata
    spec: PolicySpec = PolicySpec()


def only_set(spec: msgspec.Struct) -> dict[str, object]:
    """What of a spec differs from its defaults, as JSON values."""
    found: dict[str, object] = {}
    for one in msgspec.structs.fields(spec):
        value = getattr(spec, one.name)
        if value != one.default:
            inner = isinstance(value, msgspec.Struct)
            found[one.encode_name] = only_set(value) if inner else msgspec.to_builtins(value)
    return found


def check_spec(spec: object) -> PolicySpec:
    """A spec given as JSON values, checked as one in a file is. ConfigError names the field at fault."""
    try:
        return msgspec.convert(spec, type=PolicySpec)
    except RecursionError as error:
        raise ConfigError("nested too deeply - at `$.spec`") from error
    except ValueError as error:
        text = str(error).replace("`$.", "`$.spec.").replace("`$`", "`$.spec`")
        raise ConfigError(text if "`$.spec" in text else f"{text} - at `$.spec`") from error


def load_policy(text: str | bytes, *, source: str) -> Policy:
    """Decode and check one policy document. ConfigError names `source` and the field at fault."""
    try:
        policy: Policy = decode(text, kind=Policy)
    except ValueError as error:
        hint = f"; rules are {', '.join(get_args(RuleName))}" if "$.spec.rule`" in str(error) else ""
        raise ConfigError(f"{source}: {in_words(error, of=Policy)}{hint}") from error
    return policy


DEFAULT_POLICY = Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name="default"))
