"""The prefaces of a connection (RFC 9113, section 3.4): the first bytes of either side. Pure."""

from __future__ import annotations

from epp.transport.http2.frames import (
    DEFAULT_WINDOW,
    PREFACE,
    Code,
    FrameError,
    Setting,
    settings,
    window_update,
)
from epp.transport.http2.limits import Limits


def hello(limits: Limits) -> bytes:
    """Return our settings and the window of the connection, which must be sent first."""
    values = (
        (Setting.HEADER_TABLE_SIZE, 0),
        (Setting.MAX_CONCURRENT_STREAMS, limits.max_streams),
        (Setting.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
        (Setting.MAX_FRAME_SIZE, limits.max_frame_bytes),
        (Setting.MAX_HEADER_LIST_SIZE, limits.max_header_bytes),
    )
    return settings(values) + window_update(0, limits.connection_window_bytes - DEFAULT_WINDOW)


def length(data: bytes) -> int:
    """Return the length of the peer's preface in front of the received bytes. 0: the preface is not complete
    yet. Raises FrameError if something else has come.
    """
    if not PREFACE.startswith(data[: len(PREFACE)]):
        raise FrameError(Code.PROTOCOL_ERROR, "bad_preface")
    return 0 if len(data) < len(PREFACE) else len(PREFACE)
