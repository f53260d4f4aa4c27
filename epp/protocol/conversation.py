"""Handles one call of ext_proc, which carries one HTTP request of the data plane. A call takes the bytes of a
message, and sends the bytes of its answers.

Everything is synchronous: a message is handled completely before the next message, so requests never
interleave inside the picker. A transport makes a `Caller` for each call, and hands on what comes.
`live_streams` has the parts that all calls share. `codec` turns messages into events, and actions into
messages. `stream` decides the answers, and knows no bytes.

Invariant: however a call ends, its `HttpStream` is closed, so that no booking outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from epp.picker.phases import Phase
from epp.protocol.asking import bounded_trace
from epp.protocol.calls import Caller, Handler
from epp.protocol.codec import decode, echo_of, echoes_in, encode
from epp.protocol.header_names import RESPONSE_NAMES
from epp.protocol.http_events import Action, StreamProtocolError
from epp.protocol.live_streams import LiveStreams
from epp.protocol.stream import HttpStream
from epp.transport.http2.grpc_messages import INVALID_ARGUMENT, OK

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"


class Conversation(Handler):
    """Handles one call. The transport calls `message` for each message. At the end the transport calls
    `half_closed` if the data plane has ended its side in good order, otherwise `gone`.
    """

    __slots__ = ("_call", "_names", "_picked", "_stream", "_streams")

    urgent = True

    def __init__(self, streams: LiveStreams, call: Caller) -> None:
        self._streams = streams
        self._call = call
        self._names: frozenset[str] = frozenset()
        self._picked = False
        self._stream: HttpStream | None = None
        """None: no message has come yet."""

    def message(self, data: bytes, *, now: float) -> None:
        stream = self._stream
        if stream is None:
            stream = self._begin(now=now)
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
        if not stream.hold and stream.can_detach:
            self._streams.let_go(stream, now=now)

    def half_closed(self, *, now: float) -> None:
        self._call.end(OK)
        stream, streams = self._stream, self._streams
        if stream is not None:
            streams.live.pop(stream, None)
            stream.half_close(now=now)
            if streams.picker.flow_decides:
                streams.room()

    def gone(self, *, now: float, broken: bool) -> None:
        """Release the stream. Idempotent."""
        stream, streams = self._stream, self._streams
        if stream is not None:
            streams.live.pop(stream, None)
            stream.close(now=now, broken=broken)
            if streams.picker.flow_decides:
                streams.room()

    def _begin(self, *, now: float) -> HttpStream | None:
        """Return the stream of a new request. None: the data plane no longer waits for the answer."""
        call, streams = self._call, self._streams
        if not call.is_open:
            return None
        picker, context = streams.picker, streams.context
        if picker.policy is not streams.policy or picker.flow_read is not streams.flow_read:
            streams.renew()
        self._names = streams.names
        stream = self._stream = HttpStream(
            context,
            unread=streams.overload.skips(waited_s=call.waited_s(), now=now),
            deliver=self._later,
            trace=bounded_trace(call.trace) if context.settings.traced else "",
        )
        streams.live[stream] = call
        streams.last_began = now
        return stream

    def _still_wanted(self, stream: HttpStream, *, now: float) -> bool:
        """Return whether the data plane would use a pick. If the body has waited for too long, it is not read
        any more.
        """
        if not self._call.is_open:
            return False
        if self._streams.overload.late(waited_s=self._call.waited_s(), now=now):
            stream.hurry()
        return True

    def _answer(self, stream: HttpStream, data: bytes, *, now: float) -> None:
        call = self._call
        if stream.passes and (echo := echo_of(data)) is not None:
            call.send(echo)
            return
        event = decode(data, names=self._names, response_names=RESPONSE_NAMES)
        actions = stream.receive(event, now=now)
        if not self._picked:
            if stream.pick is not None:
                self._picked = True
                call.leaves_work()
            elif stream.phase is Phase.WAITING:
                self._streams.room()
        for action in actions:
            call.send(encode(action))

    def _later(self, actions: Sequence[Action]) -> None:
        """Send the answers to a request that waited, because flow control has decided."""
        assert self._stream is not None, "the stream waited"
        self._picked = self._stream.pick is not None
        for action in actions:
            self._call.send(encode(action))
