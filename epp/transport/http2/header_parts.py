"""Header blocks that do not come as one plain HEADERS frame: they have padding or a priority, or they are
spread over CONTINUATION frames. Pure; called by `connection`.
"""

from __future__ import annotations

from epp.transport.http2.frames import MAX_STREAM_ID, Code, Flag, FrameError, Kind, read_u32
from epp.transport.http2.limits import Limits


class HeaderParts:
    """The header block that is not complete yet. No other frame may come before its end. The size of a block
    and the number of its frames are bounded.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.since: float | None = None
        """When the unfinished block began. None: there is none."""
        self.number = 0
        """The stream of the latest block."""
        self.ends = False
        """Whether this block ends the peer's side of the stream."""
        self.depends_on_itself = False
        """Whether the priority of this stream names the stream itself."""
        self._block = bytearray()
        self._frames = 0

    def take(self, kind: int, flags: int, number: int, payload: bytes, *, now: float) -> bytes | None:
        """Add a HEADERS or CONTINUATION frame. Returns the block if it is complete. Raises FrameError."""
        if kind == Kind.HEADERS:
            self._begin(flags, number, payload)
        else:
            self._go_on(payload)
        if not flags & Flag.END_HEADERS:
            if self.since is None:
                self.since = now
            return None
        block, self._block, self.since = bytes(self._block), bytearray(), None
        return block

    def _begin(self, flags: int, number: int, payload: bytes) -> None:
        start, end = 0, len(payload)
        if flags & Flag.PADDED:
            start = 1
            end -= payload[0] if payload else 1
        if flags & Flag.PRIORITY:
            start += 5
        if end < start:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_padding")
        self.depends_on_itself = (
            bool(flags & Flag.PRIORITY) and read_u32(payload, start - 5)[0] & MAX_STREAM_ID == number
        )
        self.number, self.ends = number, bool(flags & Flag.END_STREAM)
        self._block, self._frames = bytearray(payload[start:end]), 1

    def _go_on(self, payload: bytes) -> None:
        if self.since is None:
            raise FrameError(Code.PROTOCOL_ERROR, "broken_header_block")
        self._block += payload
        self._frames += 1
        if self._frames > self._limits.max_header_frames:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "continuation_flood")
        if len(self._block) > self._limits.max_header_bytes:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "header_list_too_large")
