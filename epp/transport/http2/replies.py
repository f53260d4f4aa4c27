"""Answers whole messages without making events. These are the chunks of a full duplex answer, which the
picker only sends back. Pure.
"""

from __future__ import annotations

from epp.transport.http2.frames import HEAD_BYTES, Kind, pack_head, unpack_head
from epp.transport.http2.limits import Limits
from epp.transport.http2.streams import State, Stream, StreamTable

_MOST_REPLIES = 2_000
"""The most frames that are answered by replies in one read. They take some 2 ms, after which other
connections have their turn."""


def replied(data: bytes, streams: StreamTable, limits: Limits) -> int:
    """Answer the frames at the beginning of `data` for which there are replies, but not too many. Returns
    where the rest begins.

    Each of these frames is a whole DATA frame. Most reads of a full duplex answer have no other frames. The
    windows change as they do for all other frames.
    """
    windows, by_number, most_bytes = streams.windows, streams.by_number, limits.max_frame_bytes
    at, end, left = 0, len(data), _MOST_REPLIES
    while end - at > HEAD_BYTES and left:
        high, low, kind, flags, number = unpack_head(data, at)
        stream = by_number.get(number)
        start, size = at + HEAD_BYTES, high << 8 | low
        if (
            kind != Kind.DATA
            or flags
            or stream is None
            or stream.reply is None
            or stream.end is not None
            or stream.state is not State.OPEN
            or stream.assembly is not None
            or start + size > end
            or size > most_bytes
            or size > stream.window
            or size > windows.window
        ):
            break
        messages = stream.reply(data, start, start + size)
        if messages is None or not _send_at_once(streams, stream, messages):
            break
        windows.window -= size
        stream.window -= size
        windows.taken_in(stream, size)
        at = start + size
        left -= 1
    return at


def _send_at_once(streams: StreamTable, stream: Stream, messages: bytes) -> bool:
    """Queue whole messages, with their heads, in one frame. False: a window or the frame is too small."""
    size = len(messages)
    if (
        stream.backlog is not None
        or size > stream.peer_credit + streams.initial_window
        or size > streams.window
        or size > streams.frame_bytes
    ):
        return False
    stream.peer_credit -= size
    streams.window -= size
    streams.out.append(pack_head(size >> 8, size & 0xFF, Kind.DATA, 0, stream.number))
    streams.out.append(messages)
    return True
