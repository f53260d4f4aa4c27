"""Many streams at once with resets and windows, compared with a model that counts bytes."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from epp.transport.http2.frames import DEFAULT_WINDOW, Kind, Limits, Setting
from epp.transport.http2.frames import settings as settings_frame
from epp.transport.http2.messages import Gone, HalfClosed, HeldBytes, Http2Event, Message, Opened
from tests.harness.http2_frames import CallerSide, data, grpc, headers, messages_in, reset, window_update
from tests.invariants.transport import check_connection

LIMITS = Limits(
    max_message_bytes=5000, stream_window_bytes=4000, connection_window_bytes=70_000, backlog_bytes=1000
)


@dataclass
class CallBooks:
    """What a caller and its server sent to each other on one stream."""

    number: int
    window: int
    """Bytes that the server may still send."""
    credit: int = LIMITS.stream_window_bytes
    """Bytes that the caller may still send."""
    unsent: bytes = b""
    """Messages that were begun and are not sent yet."""
    expected: list[bytes] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)
    answered: bytes = b""
    received: bytes = b""
    ended: bool = False
    """True when the caller has ended the stream."""
    finished: bool = False
    """True when the server has ended the stream."""
    trailers: bool = False
    cut: bool = False
    gone: int = 0
    replied: list[bytes] = field(default_factory=list)
    """Messages of the last frame that have a reply."""

    def reply(self, data: bytes, at: int, end: int) -> bytes | None:
        """Return the messages as they came, if they are whole."""
        messages = messages_in(data[at:end])
        if messages is None:
            return None
        self.replied = messages
        return data[at:end]


class Http2Machine(RuleBasedStateMachine):
    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.side = CallerSide(limits=LIMITS, held=HeldBytes(10**6)).opened()
        self.known: dict[int, CallBooks] = {}
        self.next = 1
        self.initial = DEFAULT_WINDOW
        self.window = DEFAULT_WINDOW
        self.credit = LIMITS.connection_window_bytes

    def take(self, events: list[Http2Event]) -> None:
        for event in events:
            if isinstance(event, Message):
                self.known[event.stream_id].taken.append(event.data)
                self.known[event.stream_id].replied = []
            elif isinstance(event, Gone):
                self.known[event.stream_id].gone += 1
            else:
                assert isinstance(event, Opened | HalfClosed), event
        self.look()

    def look(self) -> None:
        """Read what the server sent, and check it against the caller's windows."""
        for f in self.side.sent():
            call = self.known.get(f.number)
            if f.kind == Kind.WINDOW_UPDATE:
                more = int.from_bytes(f.payload)
                if call is None:
                    self.credit += more
                else:
                    call.credit += more
            elif f.kind == Kind.DATA:
                assert call is not None
                assert not call.trailers
                call.received += f.payload
                call.window -= len(f.payload)
                self.window -= len(f.payload)
                assert call.window >= 0, "beyond the stream's window"
                assert self.window >= 0, "beyond the connection's window"
            elif f.kind == Kind.HEADERS and f.ends:
                assert call is not None
                call.trailers = True

    @rule(target=calls)
    def open(self) -> CallBooks:
        call = self.known[self.next] = CallBooks(self.next, self.initial)
        self.next += 2
        self.take(self.side.feed(headers(call.number)))
        return call

    @rule(call=calls, message=st.binary(max_size=3000))
    def begin_message(self, call: CallBooks, message: bytes) -> None:
        if not call.ended and not call.cut and not call.finished:
            call.unsent += grpc(message)
            call.expected.append(message)

    @rule(call=calls, size=st.integers(1, 3000))
    def send_some(self, call: CallBooks, size: int) -> None:
        if call.ended or call.cut or call.trailers:
            return
        size = min(size, len(call.unsent), call.credit, self.credit)
        part, call.unsent = call.unsent[:size], call.unsent[size:]
        call.credit -= size
        self.credit -= size
        if part:
            self.take(self.side.feed(data(call.number, part)))
            call.taken += call.replied
            call.answered += b"".join(grpc(message) for message in call.replied)
            call.replied = []

    @rule(call=calls)
    def reply_from_now_on(self, call: CallBooks) -> None:
        self.side.connection.reply(call.number, call.reply)

    @rule(call=calls)
    def end_call(self, call: CallBooks) -> None:
        if not call.ended and not call.cut and not call.unsent and not call.trailers:
            call.ended = True
            self.take(self.side.feed(data(call.number, ends=True)))

    @rule(call=consumes(calls))
    def cut_call(self, call: CallBooks) -> None:
        if not call.cut:
            call.cut = True
            self.take(self.side.feed(reset(call.number)))

    @rule(call=calls, message=st.binary(max_size=20_000))
    def answer(self, call: CallBooks, message: bytes) -> None:
        if not call.finished and not call.cut:
            call.answered += grpc(message)
            self.side.connection.send(call.number, message)
            self.look()

    @rule(call=calls)
    def finish(self, call: CallBooks) -> None:
        if not call.finished and not call.cut:
            call.finished = True
            self.side.connection.end(call.number)
            self.look()

    @rule(call=calls, more=st.integers(1, 30_000))
    def widen_stream(self, call: CallBooks, more: int) -> None:
        call.window += more
        self.take(self.side.feed(window_update(call.number, more)))

    @rule(more=st.integers(1, 30_000))
    def widen_connection(self, more: int) -> None:
        self.window += more
        self.take(self.side.feed(window_update(0, more)))

    @rule(size=st.integers(0, 100_000))
    def change_initial_window(self, size: int) -> None:
        # A data plane may change this many at once. The limit of changes has its own test.
        self.side.now += 1
        for call in self.known.values():
            call.window += size - self.initial
        self.initial = size
        # The caller counts by the new window only when the server has acknowledged it. Frames that were
        # sent before count by the old window.
        self.take(self.side.feed(settings_frame([(Setting.INITIAL_WINDOW_SIZE, size)])))

    @invariant()
    def books_agree(self) -> None:
        check_connection(self.side.connection)
        for call in self.known.values():
            assert call.answered.startswith(call.received)
            assert call.taken == call.expected[: len(call.taken)]
            assert call.gone <= 1
            assert not call.trailers or call.finished
            if call.cut:
                assert call.gone == (0 if call.finished else 1)

    def teardown(self) -> None:
        """With all windows open, every answer arrives. Then nothing is left."""
        side = self.side
        self.window += 10**8
        self.take(side.feed(window_update(0, 10**8)))
        for call in self.known.values():
            call.window += 10**8
            self.take(side.feed(window_update(call.number, 10**8)))
            if not call.cut:
                assert call.received == call.answered
                assert call.trailers == call.finished
        side.connection.close(now=side.now)
        check_connection(side.connection)
        assert (side.held.now, side.held.unsent, len(side.held.messages)) == (0, 0, 0)


TestHttp2Machine = pytest.mark.slow(Http2Machine.TestCase)
TestHttp2Machine.settings = settings(max_examples=60, stateful_step_count=50)
