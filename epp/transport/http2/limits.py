"""The limits on what a peer may cause, and token buckets against floods. Pure: time is an argument.

Some frames cost us little, but cost the peer even less (PING, SETTINGS, an empty DATA). Each such frame takes
a token from the bucket of its kind. Tokens come back with time. A peer that empties a bucket is disconnected
with ENHANCE_YOUR_CALM. The buckets are far larger than what Envoy, grpcio or a busy client needs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one connection, in bytes, seconds and counts."""

    max_message_bytes: int
    """A longer gRPC message is answered with RESOURCE_EXHAUSTED."""
    max_streams: int = 10_000
    """Streams open at once. A client that needs more opens another connection."""
    max_header_bytes: int = 16_384
    """Size of one header block on the wire, and of its decoded list (RFC 9113, 6.5.2)."""
    max_header_frames: int = 16
    """HEADERS and CONTINUATION frames of one block."""
    stream_window_bytes: int = 2**20
    connection_window_bytes: int = 2**24
    max_frame_bytes: int = 2**20
    """Size of a DATA frame. The kinds of other frames bound their sizes."""
    backlog_bytes: int = 2**18
    """While more than this waits for the peer's window on a stream, bytes that the peer sends there do not
    open our window."""
    all_backlogs_bytes: int = 2**24
    """While more than this waits for the peer's windows on all streams, the window of the connection does not
    open either."""
    hello_s: float = 10.0
    """Longest time from the connection's start to the end of the client's preface and first SETTINGS."""
    header_s: float = 10.0
    """Longest time from a HEADERS frame to the end of its block."""
    message_s: float = 30.0
    """Longest time from the beginning of a gRPC message to its end."""
    settings_s: float = 30.0
    """Longest time from our SETTINGS to their acknowledgement."""
    stalled_s: float = 300.0
    """A stream is reset if its answer waits this long for the peer's window."""
    linger_s: float = 10.0
    """How long a peer may go on sending after its call was refused."""
    quiet_s: float = 60.0
    """A peer with open streams that sends nothing for this long gets a PING."""
    answer_s: float = 20.0
    """Longest wait for the answer to that PING, or to our request to leave."""
    idle_s: float = 900.0
    """A peer without streams that sends nothing for this long is asked to leave."""


class Unfinished(Protocol):
    """A message whose end has not come yet."""

    began: float

    def lose(self, reason: str) -> None:
        """Throw away the bytes. The call ends later."""


@dataclass(slots=True, eq=False)
class Holder:
    """The unfinished messages of one connection."""

    now: int = 0
    messages: OrderedDict[Unfinished, None] = field(default_factory=OrderedDict)
    """The oldest first."""
    torn: list[int] = field(default_factory=list)
    """Streams that have lost the bytes of a message."""


@dataclass(slots=True)
class HeldBytes:
    """The bytes that all connections together hold: unfinished messages, and answers that nobody has read."""

    most: int
    """The bound of either kind."""
    now: int = 0
    """Bytes of unfinished messages."""
    unsent: int = 0
    """Bytes of answers that wait for a peer's window."""
    messages: OrderedDict[Unfinished, None] = field(default_factory=OrderedDict)
    """The unfinished messages, the oldest first."""

    def make_room(self, holder: Holder) -> None:
        """Throw away the oldest messages while there are too many bytes: first those of a holder that has
        several and more than its share, half of the bytes. A peer that sends its messages to their ends holds
        none for long, so a newcomer does not pay for those who hold back.
        """
        while 2 * holder.now > self.most and len(holder.messages) > 1:
            next(iter(holder.messages)).lose("too_much_held")
        while self.now > self.most:
            next(iter(self.messages)).lose("too_much_held")

    def expire(self, *, began_before: float) -> None:
        """Throw away the messages that began too long ago."""
        while self.messages and (oldest := next(iter(self.messages))).began < began_before:
            oldest.lose("message_too_slow")


_RATES: Final = {
    # what: (tokens at first and at most, tokens that come back in a second)
    "rapid_reset": (
        10_000.0,
        10_000.0,
    ),  # clients that all leave at once may cause this many; one core serves fewer
    "ping_flood": (2_000.0, 500.0),
    "settings_flood": (50.0, 5.0),
    "empty_frame_flood": (2_000.0, 200.0),
    "unneeded_frame_flood": (2_000.0, 200.0),
    "stream_error_flood": (1_000.0, 100.0),
    "header_flood": (
        20_000.0,
        5_000.0,
    ),  # blocks to decode and parts of blocks: one each, and one for 256 bytes
}


@dataclass(slots=True)
class _Bucket:
    tokens: float
    most: float
    per_s: float
    at: float = 0.0


@dataclass(slots=True)
class Floods:
    """The buckets of one connection."""

    _buckets: dict[str, _Bucket] = field(default_factory=dict)

    def too_many(self, what: str, *, tokens: float, now: float) -> bool:
        """Take tokens from the bucket `what`. True: it held fewer."""
        bucket = self._buckets.get(what)
        if bucket is None:
            most, per_s = _RATES[what]
            bucket = self._buckets[what] = _Bucket(most, most, per_s, now)
        bucket.tokens = min(bucket.most, bucket.tokens + (now - bucket.at) * bucket.per_s) - tokens
        bucket.at = now
        return bucket.tokens < 0.0
