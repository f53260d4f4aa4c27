"""The sections of a policy that the rules and the thresholds read. Defaults stand here and nowhere else."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from epp.config.strict import Ratio, Strict


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
    """Weights of the least-cost rule.
    The score is in seconds and the smallest wins: (B + (U + T V) (w + k L) + c L) / V.
    """

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
