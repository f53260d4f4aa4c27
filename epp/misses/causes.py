"""The causes of missed prompt tokens: their names, what each means, and what to change.
The one list that pages and commands show.
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
    "Nothing: no cache can hold what nobody has sent. A longer shared beginning of prompts would help.",
)
EVICTED: Final = Cause(
    "evicted",
    "evicted before it came again",
    "Add servers or KV cache (gpu-memory-utilization, KV offload), or shorten prompts: see which servers are full.",
)
ELSEWHERE: Final = Cause(
    "elsewhere",
    "sent elsewhere: its server had too much to do, or the rule does not look at prefixes",
    "Nothing, if time to first token is good: waiting would have cost more. Else add servers, or raise cost.uncachedTokenWeight.",
)
RESTARTED: Final = Cause(
    "restarted",
    "its server was restarted or removed",
    "Restart servers one at a time; look for crashes and for scale-downs.",
)
OTHER_ROOT: Final = Cause(
    "other_root",
    "the same text under another adapter, model or salt",
    "Use one cache_salt for those who may share; serve prompts of one text by one adapter.",
)
LOW_GAIN: Final = Cause(
    "low_gain",
    "too little to count: below the gain threshold",
    "Lower gain.minMatchTokens or gain.minMatchRatio, if these prompts matter.",
)
LATE: Final = Cause(
    "late",
    "learned too late: another picker had sent it there moments before",
    "Use fewer workers or replicas, or lower sharing.flushIntervalSeconds.",
)
UNAVAILABLE: Final = Cause(
    "unavailable",
    "its server was not a candidate",
    "See which servers are left out or not ready, and what the data plane's subset allows.",
)
TAIL: Final = Cause(
    "tail", "ends of prompts, shorter than a chunk or a block", "Nothing: this is the precision of the table."
)
UNREAD: Final = Cause(
    "unread",
    "the prompt was not read",
    "See epp_unread_bodies_total and epp_overload_ratio: too large, compressed, or too much load.",
)

CAUSES: Final = (NEW, EVICTED, ELSEWHERE, RESTARTED, OTHER_ROOT, LOW_GAIN, LATE, UNAVAILABLE, TAIL, UNREAD)
