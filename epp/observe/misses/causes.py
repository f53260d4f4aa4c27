"""The causes of missed prompt tokens: their names, what each means, and what to change. All pages and
commands show this list.
"""

from __future__ import annotations

from typing import Final, NamedTuple


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
