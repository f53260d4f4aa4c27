"""Defines the routing policy: the `spec` of a PrefixRoutingPolicy object, from a file or from Kubernetes.

Every default of routing is here. The structs are frozen: a changed policy is a new object, and code that
holds the old object finishes its work with it. Units are in the names. The reference page and the Kubernetes
schema are generated from these structs.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from epp.base.errors import ConfigError
from epp.config.dialects import MOST_DESTINATIONS
from epp.config.flow import Flow
from epp.config.routing import (
    Chunks,
    Cost,
    Disaggregation,
    FailureSettings,
    Gain,
    LoadSettings,
    Lora,
    PrefixHashSettings,
    Sampling,
    Scrape,
    Table,
)
from epp.config.strict import Strict
from epp.config.yaml_faults import decode, in_words

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
            raise ValueError(f"targetRef.group: does not have the kind {self.kind}; leave group out")


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


def only_set(spec: msgspec.Struct) -> dict[str, object]:
    """Return the fields of a spec that differ from their defaults, as JSON values."""
    found: dict[str, object] = {}
    for one in msgspec.structs.fields(spec):
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
    except RecursionError as error:
        raise ConfigError("spec: nested too deeply") from error
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
