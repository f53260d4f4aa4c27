"""The open streams of one connection: the record of a stream, flow control in both directions, how a stream
ends, and the faults of the peer. Pure; called by `connection` for each frame of a call.

A stream is open until the table forgets it. The server opens no streams.
"""

from itertools import islice
from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.frames import RATES, Code, Flag, FrameError, Kind, Limits, pack_head
from epp.transport.http2.messages import (
    GRPC_RESPONSE,
    INTERNAL,
    NO_CALL,
    OK,
    REFUSALS,
    Assembly,
    BadMessageError,
    Fault,
    Gone,
    HalfClosed,
    HeldBytes,
    Http2Event,
    Reply,
    pack_prefix,
    trailers,
)

_LATELY: Final = 1_000


class Stream:
    """One open stream. Windows are in bytes. They may be negative if the peer has reduced its own."""

    __slots__ = (
        "answered", "assembly", "backlog", "credit", "declared", "end", "number", "peer_credit", "peer_ended",
        "reply", "window",
    )  # fmt: skip

    def __init__(self, number: int, *, window: int) -> None:
        self.number = number
        self.peer_ended = False
        """Whether the peer has sent everything (half-closed, remote)."""
        self.window = window
        """How many more bytes the peer may send."""
        self.credit = 0
        """Consumed bytes that the next WINDOW_UPDATE will report to the peer."""
        self.peer_credit = 0
        """How many more bytes we may send, besides the peer's initial window. The peer may change this window
        for all streams at once."""
        self.assembly: Assembly | None = None
        """The unfinished message. None: there is none."""
        self.backlog: bytearray | None = None
        """Bytes that wait for the peer's window. None: there are none."""
        self.end: bytes | None = None
        """The header block of the trailers, to be sent after the backlog. Empty: the last frame of the
        backlog ends the stream."""
        self.answered = False
        """Whether our response headers are sent."""
        self.reply: Reply | None = None
        """Answers whole messages without an event. Is None again after each event, so that answers keep the
        order of the messages."""
        self.declared: int | None = None
        """Bytes still to come by Content-Length. None: any number."""

    def drop_assembly(self) -> None:
        if self.assembly is not None:
            self.assembly.drop()
            self.assembly = None


class StreamTable:
    """The table of open streams, and what is sent to the peer: frames in the order of the wire, as far as the
    peer's windows and frame size allow.

    An answer that does not fit its windows waits on its stream, in order, and delays no other stream. Our own
    windows open again as received bytes are consumed, in steps of half a window. While too much of a stream's
    answer waits, the window of this stream stays closed. While too much waits on all streams, the window of
    the connection does, too. So a peer can make us hold no more than `all_backlogs_bytes` and one window.

    A stream leaves the table only in `forget`, which releases everything that the stream held. A method that
    handles a fault may raise FrameError, which ends the connection.
    """

    def __init__(self, limits: Limits, held: HeldBytes, *, now: float) -> None:
        self.limits = limits
        self.held = held
        self.now = now
        self.steps = 0
        """How many more steps may be taken before the owner looks at the clock. Frames, messages and answers
        that are sent on count as steps, and parts of dear frames do, too."""
        self.events: list[Http2Event] = []
        """Events that wait for the connection's owner."""
        self.out: list[bytes | bytearray] = []
        """The frames to be written, in the order of the wire."""
        self.by_number: dict[int, Stream] = {}
        self.lingering: dict[Stream, float] = {}
        """Refused streams whose peers have not ended them yet, with the time of the refusal. What the peers
        send there is thrown away."""
        self.stalled: dict[Stream, float] = {}
        """Streams that wait for either window, with the time since when. The longest waiting come first."""
        self.own = held.of_a_connection()
        """What this connection holds of `held`."""
        self.lately: dict[int, None] = {}
        """Streams that we reset a short time ago. Frames that the peer sent before it knew of the reset are
        ignored."""
        self.last_id = 0
        """The highest stream number that the peer has used."""
        self.our_window = limits.connection_window_bytes
        """How many more bytes the peer may send on the connection."""
        self.window = frames.DEFAULT_WINDOW
        """How many more bytes we may send on the connection."""
        self.initial_window = frames.DEFAULT_WINDOW
        """The peer's window of each new stream."""
        self.frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._credit = 0
        self._step = limits.connection_window_bytes // 2
        self._stream_step = limits.stream_window_bytes // 2
        self.waiting: dict[Stream, None] = {}
        """Streams that wait for the window of the connection, or for their turn to send."""
        self._buckets: dict[str, tuple[float, float]] = {}
        """The tokens of a bucket, and when they were counted."""

    # -- our windows -----------------------------------------------------------------------------------------

    def taken_in(self, stream: Stream | None, size: int) -> None:
        """Open the windows by so many bytes, which have been consumed. None: they belong to no stream."""
        if stream is not None:
            stream.credit += size
            if stream.credit >= self._stream_step:
                self._open_stream(stream)
        self._credit += size
        if self._credit >= self._step:
            self._open()

    def _open_stream(self, stream: Stream) -> None:
        waits = len(stream.backlog) if stream.backlog is not None else 0
        if (
            stream.credit >= self._stream_step
            and not stream.peer_ended
            and waits <= self.limits.backlog_bytes
        ):
            self.out.append(frames.window_update(stream.number, stream.credit))
            stream.window += stream.credit
            stream.credit = 0

    def _open(self) -> None:
        if self._credit >= self._step and self.own.unsent <= self.limits.all_backlogs_bytes:
            self.out.append(frames.window_update(0, self._credit))
            self.our_window += self._credit
            self._credit = 0

    # -- answers ---------------------------------------------------------------------------------------------

    def take(self) -> bytes:
        """Return the bytes to write now. Each byte is returned once."""
        data = b"".join(self.out)
        self.out.clear()
        return data

    def send(self, number: int, message: bytes) -> None:
        """Queue one message of the answer, after its headers. Does nothing if the stream is gone."""
        stream = self.by_number.get(number)
        if stream is None or stream.end is not None:
            return
        if not stream.answered:
            stream.answered = True
            self.send_headers(stream.number, GRPC_RESPONSE, flags=Flag.END_HEADERS)
        framed = pack_prefix(0, len(message)) + message
        if not self.send_whole(stream, framed):
            self.queue(stream, framed)

    def send_whole(self, stream: Stream, data: bytes) -> bool:
        """Queue whole messages, with their heads, in one frame. False: a window or the frame is too small."""
        size = len(data)
        if (
            stream.backlog is not None
            or size > stream.peer_credit + self.initial_window
            or size > self.window
            or size > self.frame_bytes
        ):
            return False
        stream.peer_credit -= size
        self.window -= size
        self.out.append(pack_head(size >> 8, size & 0xFF, Kind.DATA, 0, stream.number))
        self.out.append(data)
        return True

    def queue(self, stream: Stream, data: bytes) -> None:
        """Send bytes of the answer, or let them wait for the windows."""
        if stream.backlog is None:
            stream.backlog = bytearray()
        stream.backlog += data
        self._wait(len(data))
        if stream not in self.stalled:
            self.pump(stream)

    def _wait(self, more: int) -> None:
        """Count bytes that begin or cease to wait for the peer's windows."""
        self.own.unsent += more
        self.held.unsent += more
        self._open()

    def end(self, number: int, status: int = OK, details: str = "") -> None:
        """End the answer with trailers, after all waiting data. Does nothing if the stream is gone."""
        stream = self.by_number.get(number)
        if stream is not None and stream.end is None:
            stream.end = trailers(status, details, alone=not stream.answered)
            self.pump(stream)

    def pump(self, stream: Stream) -> None:
        """Send as much of the waiting data as the windows allow."""
        if self._send_waiting(stream):
            self._we_ended(stream)
        else:
            self._open_stream(stream)

    def _send_waiting(self, stream: Stream) -> bool:
        """Send the waiting bytes of a stream. Returns whether the answer is sent completely."""
        backlog = stream.backlog
        while backlog:
            window = stream.peer_credit + self.initial_window
            size = min(len(backlog), self.frame_bytes, window, self.window)
            if size <= 0:
                if window > 0:
                    self.waiting[stream] = None
                self.stalled.setdefault(stream, self.now)
                return False
            flags = Flag.END_STREAM if stream.end == b"" and size == len(backlog) else 0
            self.out.append(pack_head(size >> 8, size & 0xFF, Kind.DATA, flags, stream.number))
            self.out.append(backlog[:size])
            del backlog[:size]
            stream.peer_credit -= size
            self.window -= size
            self._wait(-size)
            self.stalled.pop(stream, None)
        stream.backlog = None
        if stream.end:
            self.send_headers(stream.number, stream.end, flags=Flag.END_HEADERS | Flag.END_STREAM)
        return stream.end is not None

    def send_headers(self, number: int, block: bytes, *, flags: int) -> None:
        size = len(block)
        self.out.append(pack_head(size >> 8, size & 0xFF, Kind.HEADERS, flags, number) + block)

    # -- the peer's windows ----------------------------------------------------------------------------------

    def on_window(self, number: int, more: int) -> None:
        """Called when the peer opens its window of a stream, or that of the connection, which has number 0.
        `send_some` sends what may be sent on the connection now.
        """
        stream = self.by_number.get(number)
        code = Code.FLOW_CONTROL_ERROR if more else Code.PROTOCOL_ERROR
        if not number:
            self.window += more
            if not more or self.window > frames.MAX_WINDOW:
                raise FrameError(code, "window_overflow")
        elif stream is None:
            self.unexpected(number, Kind.WINDOW_UPDATE)
        elif not more or stream.peer_credit + self.initial_window + more > frames.MAX_WINDOW:
            self.stream_error(number, code, "window_overflow")
        else:
            stream.peer_credit += more
            if stream.backlog is not None:
                self.pump(stream)

    def widen_all(self, initial_window: int) -> None:
        """Called when the peer changes its initial window. `send_some` sends what may be sent now."""
        widest = max((stream.peer_credit for stream in self.by_number.values()), default=0)
        if widest + initial_window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overflow")
        self.initial_window = initial_window
        self.waiting.update(dict.fromkeys(self.stalled))

    def send_some(self, most: int) -> bool:
        """Send the answers of at most so many streams that waited for their turn, those first that have
        waited longest. Returns whether more may be sent now.
        """
        for stream in list(islice(self.waiting, most)):
            if self.window <= 0:
                break
            del self.waiting[stream]
            self.pump(stream)
        return bool(self.waiting) and self.window > 0

    # -- ends ------------------------------------------------------------------------------------------------

    def peer_ended(self, stream: Stream) -> None:
        """Called when the peer has sent END_STREAM and everything before it."""
        stream.peer_ended = True
        if stream.assembly is not None:
            text = "the stream ended within a message"
            self.give_up(stream, BadMessageError(INTERNAL, text, reason="cut_message"))
        elif stream.end is not None and stream.backlog is None:
            self.forget(stream)  # a refused call, whose answer was sent before
        else:
            self.events.append(HalfClosed(stream.number))

    def _we_ended(self, stream: Stream) -> None:
        """Ask a peer that still sends to stop, since our answer is sent, unless its call was refused."""
        if not stream.peer_ended:
            if stream in self.lingering:
                return
            self.send_reset(stream.number, Code.NO_ERROR)
        self.forget(stream)

    def send_reset(self, number: int, code: Code) -> None:
        self.out.append(frames.reset(number, code))
        if len(self.lately) >= _LATELY:
            del self.lately[next(iter(self.lately))]
        self.lately[number] = None

    def cut(self, stream: Stream) -> None:
        """Forget a stream that has not come to its end. The handler of the call learns of this, if there is
        one and it has not ended the call.
        """
        self.forget(stream)
        if stream.end is None:
            self.events.append(Gone(stream.number))

    def forget(self, stream: Stream) -> None:
        self.by_number.pop(stream.number, None)
        self.lingering.pop(stream, None)
        self.stalled.pop(stream, None)
        self.waiting.pop(stream, None)
        if stream.backlog is not None:
            self._wait(-len(stream.backlog))
            stream.backlog = None
        stream.drop_assembly()

    # -- the faults of the peer ------------------------------------------------------------------------------

    def too_many(self, what: str, *, tokens: float = 1.0) -> None:
        """Take tokens from the bucket `what`. Raises FrameError if there are too few."""
        now, (most, per_s) = self.now, RATES[what]
        held, counted_at = self._buckets.get(what, (most, now))
        left = min(most, held + (now - counted_at) * per_s) - tokens
        self._buckets[what] = left, now
        if left < 0.0:
            raise FrameError(Code.ENHANCE_YOUR_CALM, what)

    def unexpected(self, number: int, kind: int) -> None:
        """Handle a frame on a stream that is not open for it (RFC 9113, section 5.1). Late frames that change
        nothing are ignored.
        """
        stream = self.by_number.get(number)
        # Streams with even numbers are ours to open, and we open none.
        opened = stream is not None or (number % 2 and number <= self.last_id)
        if number in self.lately or (opened and kind not in (Kind.HEADERS, Kind.DATA)):
            return
        if not opened:
            raise FrameError(Code.PROTOCOL_ERROR, "frame_on_idle_stream")
        if stream is None and kind == Kind.HEADERS:
            raise FrameError(Code.STREAM_CLOSED, "frame_on_closed_stream")
        self.stream_error(number, Code.STREAM_CLOSED, "frame_on_closed_stream")

    def give_up(self, stream: Stream, error: BadMessageError) -> None:
        """End a call whose message is refused. Its service does not know of the message."""
        self.too_many("stream_error_flood")
        self.events.append(Fault(error.reason))
        self.events.append(Gone(stream.number))
        stream.drop_assembly()
        self.end(stream.number, error.status, str(error))

    def stream_error(self, number: int, code: Code, reason: str) -> None:
        stream = self.by_number.get(number)
        if stream is not None:
            self.cut(stream)
        self.too_many("stream_error_flood")
        self.events.append(Fault(reason))
        self.send_reset(number, code)

    def refuse(self, stream: Stream, http_status: int) -> None:
        """Answer a stream that is not a gRPC call with an HTTP response. The stream's body is thrown away."""
        self.events.append(Fault("no_grpc_call"))
        self.lingering[stream] = self.now
        stream.answered = True
        self.send_headers(stream.number, REFUSALS[http_status], flags=Flag.END_HEADERS)
        stream.end = b""
        self.queue(stream, NO_CALL)

    def fail(self, code: Code, reason: str) -> None:
        """Send GOAWAY and drop every open stream."""
        self.out.append(frames.goaway(self.last_id, code, reason))
        for stream in list(self.by_number.values()):
            self.cut(stream)
