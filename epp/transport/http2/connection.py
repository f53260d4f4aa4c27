"""One HTTP/2 connection of a gRPC server, as a pure object. It takes bytes and `now`, and returns events and
bytes to send.

This module cuts the bytes into frames, checks the order of the frames, and has the steps that every call
needs: its start and its messages. `streams` has the open streams, the windows of both directions, and the
ends of calls. `other_frames` does the rest. A connection knows no socket, no clock and no service: an edge
feeds it with `receive` and `tick`, acts on the events, answers with `send` and `end`, and writes what
`data_to_send` returns.

Invariants: every split of the same bytes gives the same events. Every `Opened` is followed by one `Gone`, or
by the owner's `end`. Memory is bounded by `Limits` for each stream and connection, and by `HeldBytes` for
unfinished messages of all of them. A frame that is not complete is kept, but not the body of DATA, which is
passed on as it comes. After `over` nothing is read.
"""

from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.frames import (
    HEAD_BYTES,
    MAX_STREAM_ID,
    PREFACE,
    Code,
    Flag,
    FrameError,
    HeaderReader,
    Kind,
    Limits,
    MalformedRequestError,
    check_field,
    read_u32,
    unpack_head,
)
from epp.transport.http2.messages import (
    PREFIX_BYTES,
    Fault,
    HalfClosed,
    HeldBytes,
    Http2Event,
    Message,
    Opened,
    Reply,
    read_prefix,
)
from epp.transport.http2.other_frames import CLOSED, Control, DataParts
from epp.transport.http2.streams import Stream, StreamTable

ALL: Final = 2**31
_ANY: Final = -1
_PREFACE: Final = -2
_DATA: Final = Kind.DATA
_CONTINUATION: Final = Kind.CONTINUATION
_PADDED: Final = Flag.PADDED
_END_STREAM: Final = Flag.END_STREAM
_FORM: Final = Flag.PADDED | Flag.PRIORITY | Flag.END_HEADERS
"""The flags that say in which form a header block comes."""


class Connection:
    """The server's side of one connection."""

    def __init__(self, limits: Limits, held: HeldBytes, *, now: float) -> None:
        self._limits = limits
        self._read_at = now
        self._data = b""
        """The bytes that are not read yet. They begin at `_at`."""
        self._at = 0
        self._awaited: int = _PREFACE
        """The only thing that may come now: the preface, frames of one kind, or `_ANY` frame."""
        self._awaited_since = now
        self._headers = HeaderReader(limits)
        self._table = StreamTable(limits, held, now=now)
        self.streams = self._table.by_number
        """The open streams: an answer on another stream cannot reach the peer."""
        self._data_parts = DataParts(self._table)
        self._control = Control(self._table)
        self.pending = False
        """Whether `receive` stopped at its limit and must be called again."""
        self.over = ""
        """Why the connection must be closed. Empty: it need not be closed."""
        self.data_to_send = self._table.take
        """Returns the bytes to write now. Each byte is returned once."""
        self.send, self.end = self._table.send, self._table.end
        """Send a message of an answer, or end the answer."""
        self._table.out.append(frames.hello(limits))

    # -- for the owner ---------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes of answers that wait for the peer's windows."""
        return self._table.own.unsent

    def receive(self, data: bytes, *, now: float, limit: int = ALL) -> list[Http2Event]:
        """Read received bytes in at most about `limit` steps. The rest stays for the next call."""
        if not self.over:
            table = self._table
            table.now = self._read_at = now
            table.steps = limit
            if data:
                left = self._data[self._at :]
                self._data, self._at = left + data if left else data, 0
            try:
                self._read()
            except FrameError as error:
                self._fail(error.code, error.reason)
            if table.waiting and table.send_some(max(1, table.steps)):
                self.pending = True
        return self._taken()

    def reply(self, stream_id: int, reply: Reply) -> None:
        """Answer the next messages by `reply`, without events, as long as they come in whole frames and
        `reply` has an answer. Does nothing if the stream is gone.
        """
        stream = self.streams.get(stream_id)
        if stream is not None and stream.answered and stream.declared is None:
            stream.reply = reply

    def leave(self, *, now: float) -> None:
        """Ask the peer to open no more streams, and to close the connection after its last one."""
        self._table.now = now
        if not self.over:
            self._control.leave()

    def close(self, *, now: float, reason: str = "") -> list[Http2Event]:
        """Close at once. The open streams are gone. reason: the fault of the peer, if there is one."""
        self._table.now = now
        if not self.over:
            self._fail(Code.ENHANCE_YOUR_CALM if reason else Code.NO_ERROR, reason or CLOSED)
        return self._taken()

    def tick(self, *, now: float) -> list[Http2Event]:
        """Check all time limits. To be called a few times a second."""
        if not self.over:
            self._table.now = now
            try:
                self._check_beginning(now)
                self._control.check(read_at=self._read_at)
            except FrameError as error:
                self._fail(error.code, error.reason)
        return self._taken()

    def _taken(self) -> list[Http2Event]:
        """Take the events out of the table, since a body must not stay in memory until the next event."""
        events, self._table.events = self._table.events, []
        return events

    # -- reading ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the received bytes until the steps are used up. Raises FrameError."""
        if self._awaited == _PREFACE:
            if not PREFACE.startswith(self._data[: len(PREFACE)]):
                raise FrameError(Code.PROTOCOL_ERROR, "bad_preface")
            if len(self._data) < len(PREFACE):
                return
            self._at, self._awaited = len(PREFACE), Kind.SETTINGS
        data, at, table = self._data, self._at, self._table
        end, most, parts = len(data), self._limits.max_frame_bytes, self._data_parts
        if parts.left:
            at = parts.go_on(data, at)
        while table.steps > 0 and not parts.left and at + HEAD_BYTES <= end:
            high, low, kind, flags, number = unpack_head(data, at)
            start, size = at + HEAD_BYTES, high << 8 | low
            number &= MAX_STREAM_ID
            if self._awaited != _ANY or kind == _CONTINUATION or size > most:
                self._check(kind, number, size)
            after = start + size
            if kind != _DATA:
                after = self._on_frame(kind, flags, number, data, start, size=size)
            elif after > end or flags & _PADDED or not self._on_data(number, data, start, after, flags):
                after = parts.begin(data, start, size=size, flags=flags, number=number)
            if after < 0:
                break
            at = after
            table.steps -= 1
        self.pending = table.steps <= 0 and at < end
        self._data, self._at = (data, at) if self.pending else (data[at:], 0)

    def _on_frame(self, kind: int, flags: int, number: int, data: bytes, at: int, *, size: int) -> int:
        """Read a frame of any kind but DATA. Its payload of `size` bytes begins at `at`. Returns where the
        rest begins, or -1 if too little has come.
        """
        if kind > _CONTINUATION:
            self._control.receive(kind, flags, number, b"")
            return self._data_parts.skip(data, at, size=size)
        if size > self._limits.max_header_bytes:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "header_list_too_large")
        end = at + size
        if end > len(data):
            return -1
        if kind == Kind.WINDOW_UPDATE and size == 4:
            self._table.on_window(number, read_u32(data, at)[0] & frames.MAX_WINDOW)
        elif kind in (Kind.HEADERS, _CONTINUATION):
            self._on_header_frame(kind, flags, number, data[at:end])
        else:
            self._control.receive(kind, flags, number, data[at:end])
            self._awaited = _ANY  # If SETTINGS were awaited, they have come.
        return end

    def _check(self, kind: int, number: int, size: int) -> None:
        """Check whether such a frame may come now."""
        if self._awaited == Kind.SETTINGS != kind:
            raise FrameError(Code.PROTOCOL_ERROR, "no_settings")
        if _CONTINUATION in (self._awaited, kind) and (
            self._awaited != kind or number != self._headers.number
        ):
            raise FrameError(Code.PROTOCOL_ERROR, "broken_header_block")
        if size > self._limits.max_frame_bytes:
            raise FrameError(Code.FRAME_SIZE_ERROR, "frame_too_large")

    def _check_beginning(self, now: float) -> None:
        if self._awaited != _ANY and now - self._awaited_since > self._limits.beginning_s:
            if self._awaited == _CONTINUATION:
                raise FrameError(Code.ENHANCE_YOUR_CALM, "unfinished_headers")
            raise FrameError(Code.PROTOCOL_ERROR, "no_hello")

    # -- effects of the frames -------------------------------------------------------------------------------

    def _on_data(self, number: int, data: bytes, at: int, end: int, flags: int) -> bool:
        """Take a DATA frame with the body `data[at:end]`, if the body is one whole message, as nearly always,
        or empty at the end of the stream, or has a reply, as the chunks of a full duplex answer. Returns
        whether the frame was taken.
        """
        stream = self.streams.get(number)
        if stream is None or stream.peer_ended or stream.declared is not None or stream.assembly is not None:
            return False
        size, table = end - at, self._table
        if flags & _END_STREAM:
            if size:
                return False
            table.peer_ended(stream)
            return True
        if size > stream.window or size > table.our_window or stream.end is not None:
            return False
        answer = stream.reply(data, at, end) if stream.reply is not None else None
        if answer is None or not table.send_whole(stream, answer):
            if size < PREFIX_BYTES or size > self._limits.max_message_bytes:
                return False
            if read_prefix(data, at) != (0, size - PREFIX_BYTES):
                return False
            stream.reply = None
            table.events.append(Message(number, data[at + PREFIX_BYTES : end]))
        table.our_window -= size
        stream.window -= size
        table.taken_in(stream, size)
        return True

    def _on_header_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == Kind.HEADERS and flags & _FORM == Flag.END_HEADERS:
            self._on_headers(number, payload, ends=flags & _END_STREAM != 0)
            return
        self._table.too_many("header_flood")
        if kind == Kind.HEADERS:
            self._awaited_since = self._table.now
        block = self._headers.join(kind, flags, number, payload)
        self._awaited = _CONTINUATION if block is None else _ANY
        if block is not None:
            self._on_headers(number, block, ends=self._headers.ends)

    def _on_headers(self, number: int, block: bytes, *, ends: bool) -> None:
        if not number % 2:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        try:
            if number > self._table.last_id:
                self._open(number, block, ends=ends)
            else:
                self._on_trailers(number, block, ends=ends)
        except MalformedRequestError:
            self._table.stream_error(number, Code.PROTOCOL_ERROR, "malformed_headers")

    def _open(self, number: int, block: bytes, *, ends: bool) -> None:
        self._table.last_id = number
        request = self._headers.known.get(block) or self._headers.request(self._paid(block))
        if ends and request.declared_bytes:
            raise MalformedRequestError
        if len(self.streams) >= self._limits.max_streams:
            self._table.stream_error(number, Code.REFUSED_STREAM, "too_many_streams")
            return
        stream = self.streams[number] = Stream(number, window=self._limits.stream_window_bytes)
        stream.declared = request.declared_bytes
        stream.peer_ended = ends
        if request.refuse_status:
            self._table.refuse(stream, request.refuse_status)
            return
        self._table.events.append(Opened(number, request))
        if ends:
            self._table.events.append(HalfClosed(number))

    def _paid(self, block: bytes) -> bytes:
        """Count the bytes of a block that has to be decoded, as steps and as a flood."""
        self._table.steps -= len(block) >> 6  # a byte may be a field of its own, whose decoding takes 3 us
        self._table.too_many("header_flood", tokens=1 + (len(block) >> 8))
        return block

    def _on_trailers(self, number: int, block: bytes, *, ends: bool) -> None:
        fields = self._headers.decode(self._paid(block))
        stream = self.streams.get(number)
        if stream is None or stream.peer_ended:
            self._table.unexpected(number, Kind.HEADERS)
            return
        for name, value in fields:
            check_field(name, value)
        if not ends:
            self._table.stream_error(number, Code.PROTOCOL_ERROR, "second_headers")
        elif stream.declared:
            self._table.stream_error(number, Code.PROTOCOL_ERROR, "content_length")
        else:
            self._table.peer_ended(stream)

    def _fail(self, code: Code, reason: str) -> None:
        """End the connection."""
        self.over = reason
        self._data, self._at, self.pending = b"", 0, False
        self._table.fail(code, reason)
        if reason != CLOSED:
            self._table.events.append(Fault(reason))
