"""Adds up prompt tokens, matched tokens, and missed tokens by cause and server over the last minutes, in
buckets of ten seconds. Defines the causes, what each means and what to change, as all pages and commands show
them. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
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

CAUSES: Final = (NEW, EVICTED, ELSEWHERE, RESTARTED, LOW_GAIN, UNAVAILABLE, TAIL, UNREAD)


@dataclass(slots=True)
class Bucket:
    began_at: float
    by_policy: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The sums `requests`, `prompt_tokens` and `matched_tokens` of each policy."""
    missed: dict[Cause, dict[EndpointName | None, float]] = field(
        default_factory=lambda: {cause: {} for cause in CAUSES}
    )
    """Tokens. None: no server is named with them."""

    def miss(self, cause: Cause, tokens: float, *, server: EndpointName | None = None) -> None:
        """Add missed tokens of a cause. server: the server that is named with them."""
        if tokens <= 0:
            return
        by_server = self.missed[cause]
        if server not in by_server and sum(map(len, self.missed.values())) >= _MOST_SERVERS:
            server = None
        by_server[server] = by_server.get(server, 0.0) + tokens

    def add(self, other: Bucket) -> None:
        for policy, sums in other.by_policy.items():
            self.by_policy[policy].update(sums)
        for cause, by_server in other.missed.items():
            for server, tokens in by_server.items():
                self.missed[cause][server] = self.missed[cause].get(server, 0.0) + tokens

    def total(self) -> Counter[str]:
        """Return the sums over all policies."""
        return sum(self.by_policy.values(), Counter())


class Accounts:
    def __init__(self) -> None:
        self._buckets: deque[Bucket] = deque(maxlen=_BUCKETS)

    def bucket(self, *, now: float) -> Bucket:
        if not self._buckets or now - self._buckets[-1].began_at >= _BUCKET_S:
            self._buckets.append(Bucket(now))
        return self._buckets[-1]

    def over(self, window_s: float, *, now: float) -> Bucket:
        """Return the sums of the buckets that began within the window, as one bucket."""
        kept = [bucket for bucket in self._buckets if now - bucket.began_at <= window_s]
        found = Bucket(kept[0].began_at if kept else now)
        for bucket in kept:
            found.add(bucket)
        return found
