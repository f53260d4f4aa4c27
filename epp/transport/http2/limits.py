"""The limits on what a peer may cause."""

from __future__ import annotations

from dataclasses import dataclass


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
