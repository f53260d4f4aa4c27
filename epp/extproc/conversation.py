"""Handles the calls of ext_proc. Each call carries one HTTP request of the data plane. A call takes the bytes
of a message, and sends the bytes of its answers.

Owns the streams in flight of any transport, and their part of the drain. Everything is synchronous: a message
is handled completely before the next message, so requests never interleave inside the picker. A transport
makes a `Caller` for each call, and hands on what comes.

Invariant: however a call ends, its `HttpStream` is closed, so that no booking outlives it.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from epp.config.flow import Flow
from epp.config.policy import Policy
from epp.extproc.access_log import AccessLog
from epp.extproc.asking import bounded_trace, request_names
from epp.extproc.calls import Caller, Handler
from epp.extproc.codec import decode, echo_of, echoes_in, encode
from epp.extproc.events import Action, StreamProtocolError
from epp.extproc.headers import RESPONSE_NAMES
from epp.extproc.overload import TARGET_S, Overload
from epp.extproc.phases import Phase
from epp.extproc.settings import StreamContext, StreamSettings
from epp.extproc.stream import HttpStream
from epp.extproc.unread import Unread
from epp.gate import Gate
from epp.http2.messages import INVALID_ARGUMENT, OK
from epp.picker import Picker
from epp.picker_events import ProtocolFault

MESSAGE_SLACK_BYTES: Final = 2**20
"""Bytes for the fields around a body in its message."""


class Streams:
    """All streams of one server."""

    def __init__(
        self,
        picker: Picker,
        *,
        settings: StreamSettings,
        clock: Callable[[], float],
        gate: Gate | None = None,
    ) -> None:
        self.context = StreamContext(
            picker, settings, new_request_id=_new_request_id, timer=time.perf_counter, gate=gate
        )
        self.clock = clock
        self.live: set[Conversation] = set()
        self.overload = Overload()
        self.access_log = AccessLog(picker, self.fault)
        self._unread = Unread(picker, timer=time.perf_counter)
        self._policy: Policy | None = None
        self._read: Flow | None = None
        self._names: frozenset[str] = frozenset()
        self.untidied = False
        """Whether something was picked since the last `tidy`."""
        self.on_room: Callable[[], None] = lambda: None
        """A function that is called when the gate should be pumped soon."""

    @property
    def max_message_bytes(self) -> int:
        """The longest message. A longer message holds nonsense, or a body that is refused anyway."""
        return 2 * self.context.settings.max_body_bytes + MESSAGE_SLACK_BYTES

    def answer_unread(self, data: bytes, *, now: float) -> bytes | None:
        """Return the answer to the first message of a stream that the picker has no time to read. The stream
        ends with this answer. None: the stream must be opened.
        """
        return self._unread.answer(data, names=self.wanted(), settings=self.context.settings, now=now)

    def drain(self) -> frozenset[Conversation]:
        """Let go of every stream that has answered response headers, now and from now on. Return the streams
        whose requests waited in the gate until now.
        """
        settings = dataclasses.replace(self.context.settings, hold_streams=False)
        self.context = dataclasses.replace(self.context, settings=settings)
        now = self.clock()
        waited = frozenset(conversation for conversation in self.live if conversation.waits)
        if self.context.gate is not None:
            self.context.gate.drain(now=now)
            self.room()
        for conversation in list(self.live):
            conversation.let_go(now=now)
        return waited

    def tidy(self) -> None:
        """Evict after a pick, once the answer is written."""
        if self.untidied:
            self.untidied = False
            self.context.picker.tidy(now=self.clock())

    def fault(self, reason: str) -> None:
        """Report that the data plane sent something that could not be understood."""
        self.context.picker.report(ProtocolFault(reason))

    def room(self) -> None:
        """Have the gate pumped soon, because a request has ended or has begun to wait, or a drain has begun.
        So other requests may go now, or at another time than before.
        """
        if self.context.gate is not None and self.context.gate.waiting:
            self.on_room()

    def wanted(self) -> frozenset[str]:
        """Return the names of the request headers to decode. They depend on the policy."""
        policy = self.context.picker.policy
        read = self.context.gate.read if self.context.gate is not None else None
        if policy is not self._policy or read is not self._read:
            self._policy, self._read = policy, read
            self._names = request_names(policy.spec, read=read, traced=self.context.settings.traced)
        return self._names

    def check_integrity(self) -> None:
        for conversation in self.live:
            conversation.check_integrity()


class Conversation(Handler):
    """Handles one call. The transport calls `message` for each message. At the end the transport calls
    `half_closed` if the data plane has ended its side in good order, otherwise `gone`.
    """

    __slots__ = ("_call", "_names", "_picked", "_stream", "_streams")

    def __init__(self, streams: Streams, call: Caller) -> None:
        self._streams = streams
        self._call = call
        self._names: frozenset[str] = frozenset()
        self._picked = False
        self._stream: HttpStream | None = None
        """None: no message has come yet."""

    @property
    def waits(self) -> bool:
        """Whether the request waits in the gate."""
        return self._stream is not None and self._stream.phase is Phase.WAITING

    def message(self, data: bytes, *, now: float) -> None:
        stream = self._stream
        if stream is None:
            stream = self._begin(data, now=now)
            if stream is None:
                return
        elif not self._picked and not self._still_wanted(stream, now=now):
            return
        try:
            self._answer(stream, data, now=now)
        except StreamProtocolError as error:
            self._streams.fault(error.reason)
            self._call.end(INVALID_ARGUMENT, error.reason)
            self.gone(now=now, broken=False)
            return
        if stream.passes:
            self._call.reply(echoes_in)
        self._end_if_done(stream, now=now)

    def half_closed(self, *, now: float) -> None:
        self._call.end(OK)
        if self._stream is not None:
            self._streams.live.discard(self)
            self._stream.half_close(now=now)
            self._streams.room()

    def gone(self, *, now: float, broken: bool) -> None:
        """Release the stream. Idempotent."""
        if self._stream is not None:
            self._streams.live.discard(self)
            self._stream.close(now=now, broken=broken)
            self._streams.room()

    def let_go(self, *, now: float) -> None:
        """End the call as soon as the request no longer needs it, because a drain has begun."""
        if self._stream is not None:
            self._stream.hold = False
            self._end_if_done(self._stream, now=now)

    def check_integrity(self) -> None:
        if self._stream is not None:
            self._stream.check_integrity()

    def _begin(self, data: bytes, *, now: float) -> HttpStream | None:
        """Handle the first message. Return None if the request is answered, or if the data plane no longer
        waits for the answer.
        """
        call, streams = self._call, self._streams
        if not call.is_open:
            return None
        overload, waited_s = streams.overload, call.waited_s()
        counts = waited_s > TARGET_S or not overload.quiet
        unread = counts and overload.skips(waited_s=waited_s, now=now)
        if unread and (answer := streams.answer_unread(data, now=now)) is not None:
            call.send(answer)
            call.end(OK)
            return None
        context, self._names = streams.context, streams.wanted()
        self._stream = HttpStream(
            context,
            unread=unread,
            deliver=self._later,
            trace=bounded_trace(call.trace) if context.settings.traced else "",
        )
        streams.live.add(self)
        return self._stream

    def _still_wanted(self, stream: HttpStream, *, now: float) -> bool:
        """Return whether the data plane would use a pick. If the body has waited for too long, it is not read
        any more.
        """
        if not self._call.is_open:
            return False
        overload = self._streams.overload
        if not overload.quiet and overload.gives_up(waited_s=self._call.waited_s(), now=now):
            stream.hurry()
        return True

    def _answer(self, stream: HttpStream, data: bytes, *, now: float) -> None:
        if stream.passes and (echo := echo_of(data)) is not None:
            self._call.send(echo)
            return
        event = decode(
            data, names=self._names, response_names=RESPONSE_NAMES, first=stream.phase is Phase.START
        )
        actions = stream.receive(event, now=now)
        if not self._picked:
            self._note_pick(stream)
            if stream.phase is Phase.WAITING:
                self._streams.room()
        for action in actions:
            self._call.send(encode(action))

    def _note_pick(self, stream: HttpStream) -> None:
        if stream.pick is not None:
            self._picked = self._streams.untidied = True

    def _later(self, actions: Sequence[Action]) -> None:
        """Send the answers to a request that waited, because flow control has decided."""
        assert self._stream is not None, "the stream waited"
        self._note_pick(self._stream)
        for action in actions:
            self._call.send(encode(action))

    def _end_if_done(self, stream: HttpStream, *, now: float) -> None:
        """End the call if everything is answered and the stream is not held open."""
        if not stream.hold and stream.can_detach:
            self._streams.live.discard(self)
            stream.detach(now=now)
            self._streams.room()
            self._call.end(OK)


def _new_request_id() -> str:
    return uuid.uuid4().hex
