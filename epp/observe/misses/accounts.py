"""Adds up prompt tokens, matched tokens, and missed tokens by cause and server over the last minutes, in
buckets of ten seconds. Defines the causes, what each means and what to change, as all pages and commands show
them. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from epp.base.types import EndpointName

_BUCKET_S: Final = 10.0
_BUCKETS: Final = 90
_MOST_SERVERS: Final = 2000
"""Most pairs of a cause and a server in a bucket. Tokens of further pairs count without their server."""


class Cause(NamedTuple):
    name: str
    title: str
    advice: str


NEW: Final = Cause(
    "new",
    "never seen before",
    "Nothing to change: no cache can hold a prompt that nobody has sent before. Prompts with a longer common "
    "beginning would help.",
)
EVICTED: Final = Cause(
    "evicted",
    "evicted before the prefix came again",
    "Add servers or KV cache (gpu-memory-utilization, KV offload), or shorten prompts. The lines above show "
    "which servers are full.",
)
ELSEWHERE: Final = Cause(
    "elsewhere",
    "sent to another server: the one with the prefix had too much to do, or the rule ignores prefixes",
    "Nothing to change if time to first token is good: waiting would have cost more. Otherwise add servers, "
    "or raise cost.uncachedTokenWeight.",
)
RESTARTED: Final = Cause(
    "restarted",
    "the server with the prefix was restarted or removed",
    "Restart servers one at a time. Look for crashes and for scale-downs.",
)
LOW_GAIN: Final = Cause(
    "low_gain",
    "the cached prefix was below the gain threshold",
    "Lower gain.minMatchTokens or gain.minMatchRatio, if these prompts matter.",
)
LATE: Final = Cause(
    "late",
    "learned too late: another picker had sent the prefix to that server moments before",
    "Use fewer workers or replicas, or lower sharing.flushIntervalSeconds.",
)
UNAVAILABLE: Final = Cause(
    "unavailable",
    "the server with the prefix was not a candidate",
    "Check which servers are left out or not ready, and which servers the data plane's subset allows.",
)
TAIL: Final = Cause(
    "tail",
    "ends of prompts, shorter than a chunk or a block",
    "Nothing to change: this is the precision of the table.",
)
UNREAD: Final = Cause(
    "unread",
    "the prompt was not read",
    "Check epp_unread_bodies_total and epp_overload_ratio: bodies are too large or compressed, or the picker "
    "has too much load.",
)

CAUSES: Final = (NEW, EVICTED, ELSEWHERE, RESTARTED, LOW_GAIN, LATE, UNAVAILABLE, TAIL, UNREAD)


@dataclass(slots=True)
class Bucket:
    began_at: float
    requests: int = 0
    prompt_tokens: float = 0.0
    matched_tokens: float = 0.0
    by_policy: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests, prompt tokens and matched tokens, by policy and by these three words."""
    missed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_server: defaultdict[tuple[str, EndpointName], float] = field(
        default_factory=lambda: defaultdict(float)
    )

    def request(self, policy: str, *, prompt_tokens: float, matched_tokens: float) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.matched_tokens += matched_tokens
        self.by_policy.update(
            {
                (policy, "requests"): 1,
                (policy, "prompt"): round(prompt_tokens),
                (policy, "matched"): round(matched_tokens),
            }
        )

    def miss(self, cause: Cause, tokens: float, *, server: EndpointName | None = None) -> None:
        """Add missed tokens of a cause. server: the server that is named with them."""
        if tokens <= 0:
            return
        self.missed[cause.name] += tokens
        if server is not None and (
            len(self.by_server) < _MOST_SERVERS or (cause.name, server) in self.by_server
        ):
            self.by_server[cause.name, server] += tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """The missed tokens of one cause."""

    cause: Cause
    tokens: float
    servers: Mapping[EndpointName, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The sums over a window. Causes are ordered by size."""

    window_s: float
    requests: int
    prompt_tokens: float
    matched_tokens: float
    missed: tuple[Missed, ...]
    by_policy: Mapping[tuple[str, str], int]


class Accounts:
    def __init__(self) -> None:
        self._buckets: deque[Bucket] = deque(maxlen=_BUCKETS)

    def bucket(self, *, now: float) -> Bucket:
        if not self._buckets or now - self._buckets[-1].began_at >= _BUCKET_S:
            self._buckets.append(Bucket(began_at=now))
        return self._buckets[-1]

    def over(self, window_s: float, *, now: float) -> Account:
        """Return the sums over the buckets that began within the window."""
        kept = [bucket for bucket in self._buckets if now - bucket.began_at <= window_s]
        missed: defaultdict[str, float] = defaultdict(float)
        servers: dict[str, defaultdict[EndpointName, float]] = {c.name: defaultdict(float) for c in CAUSES}
        for bucket in kept:
            for name, tokens in bucket.missed.items():
                missed[name] += tokens
            for (name, server), tokens in bucket.by_server.items():
                servers[name][server] += tokens
        parts = [
            Missed(
                cause=cause,
                tokens=missed[cause.name],
                servers=dict(sorted(servers[cause.name].items(), key=lambda item: -item[1])),
            )
            for cause in CAUSES
        ]
        return Account(
            window_s=min(window_s, now - kept[0].began_at) if kept else 0.0,
            requests=sum(bucket.requests for bucket in kept),
            prompt_tokens=sum(bucket.prompt_tokens for bucket in kept),
            matched_tokens=sum(bucket.matched_tokens for bucket in kept),
            missed=tuple(sorted(parts, key=lambda part: -part.tokens)),
            by_policy=sum((bucket.by_policy for bucket in kept), Counter()),
        )
