"""Handles the calls of ext_proc, each of which carries one HTTP request of the data plane, and holds the
parts that all calls of one server share. A call takes the bytes of a message, and sends the bytes of its
answers. Works for any transport: it makes a `Caller` for each call, and hands on what comes. `codec` turns
messages into events, and actions into messages. `stream` decides the answers, and knows no bytes.

Everything is synchronous: a message is handled completely before the next message, so requests never
interleave inside the picker. Invariant: however a call ends, its `HttpStream` is closed, so that no booking
outlives it.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from epp.config.flow import Flow
from epp.config.policy import Policy
from epp.picker.events import Phase, ProtocolFault
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.protocol.asking import bounded_trace, request_names
from epp.protocol.calls import Caller, Handler
from epp.protocol.codec import decode, echoes_in, encode
from epp.protocol.http_events import Action, StreamProtocolError
from epp.protocol.settings import StreamContext, StreamSettings
from epp.protocol.stream import HttpStream
from epp.transport.http2.messages import INVALID_ARGUMENT, OK

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
MESSAGE_SLACK_BYTES: Final = 2**20
"""Bytes for the fields around a body in its message."""

TARGET_S: Final = 0.012
"""An older message is late. Mostly the headers of a new request wait: messages of older requests go before
new requests (`epp.transport.http2.messages`).
"""
_PATIENCE_S: Final = 0.05
_IN_A_ROW: Final = 16
"""An overload begins only after this many late requests in a row. A queue that is gone sooner was a burst or
a short pause of the machine, and changes nothing. Single late requests change nothing either.
"""
_GAP_S: Final = 0.1
"""If this much time lies between two late requests, there was no queue in between: no pause of the process is
that long.
"""
_CALM_S: Final = 0.5
"""An overload is over when no request has waited longer than the target for this time. Until then, a late
request needs no further proof to be skipped.
"""
_COUNTED: Final = 1000
"""The share is that of about so many requests."""


class Overload:
    """Decides which requests are routed without being read, so that no request waits long while the picker is
    overloaded. The one number that decides is the age of a message: the time since its bytes came, at most.

    An overload begins when the first messages of `_IN_A_ROW` requests in a row were older than `TARGET_S`,
    and this has lasted for `_PATIENCE_S`. From then on every request with an older message is routed by load,
    from its headers only, and every other request is read. So the waiting time stays near the target by
    itself, and the picker reads as many bodies as it can. No control loop has to settle.
    """

    def __init__(self) -> None:
        self._late = 0
        self._late_since = self._late_at = 0.0
        self._until = 0.0
        self._new = self._skipped = 0
        """The new requests of this overload, and those of them that were skipped."""

    def share(self, *, now: float) -> float:
        """Return the share of new requests that were recently routed by load, from 0 to 1."""
        return self._skipped / self._new if self._new and now < self._until else 0.0

    def skips(self, *, waited_s: float, now: float) -> bool:
        """Return whether a new request is routed by load, unread. waited_s: the age of its first message."""
        if waited_s > TARGET_S:
            self._note_late(now=now)
        else:
            self._late = 0
        skipped = self.late(waited_s=waited_s, now=now)
        if now < self._until:
            self._new, self._skipped = self._new + 1, self._skipped + skipped
            if self._new > _COUNTED:
                self._new, self._skipped = self._new // 2, self._skipped // 2
        return skipped

    def late(self, *, waited_s: float, now: float) -> bool:
        """Return whether there is an overload, and a message is too old for its request to be read."""
        return waited_s > TARGET_S and now < self._until

    def _note_late(self, *, now: float) -> None:
        if self._late == 0 or now - self._late_at > _GAP_S:
            self._late, self._late_since = 0, now
        self._late, self._late_at = self._late + 1, now
        goes_on = now < self._until
        if goes_on or (self._late >= _IN_A_ROW and now - self._late_since >= _PATIENCE_S):
            self._until = now + _CALM_S
            if not goes_on:
                self._new = self._skipped = 0


class LiveStreams:
    """The parts that all calls of one server share, and its drain. `Conversation` reads them as plain
    attributes. It calls `begin` and `picked` once for each request, and the other methods only now and then:
    while flow control is on, or if streams are let go.
    """

    def __init__(
        self,
        picker: Picker,
        *,
        settings: StreamSettings,
        clock: Callable[[], float],
        gate: Gate | None = None,
    ) -> None:
        self.picker = picker
        self.context = StreamContext(
            picker, settings, new_request_id=lambda: uuid.uuid4().hex, timer=time.perf_counter, gate=gate
        )
        self.clock = clock
        self.live: dict[HttpStream, Caller] = {}
        """The streams of which a message has come, with their calls."""
        self.last_began = -inf
        """When the newest stream began."""
        self.overload = Overload()
        self.policy: Policy | None = None
        self.flow_read: Flow | None = None
        self.names: frozenset[str] = frozenset()
        """The names of the request headers to decode, by `policy` and `flow_read`."""
        self.on_room: Callable[[], None] = lambda: None
        """A function that is called when the gate should be pumped soon."""
        self.on_pick: Callable[[], object] = lambda: None
        """A function that has `tidy` called once the answer of a pick is written."""
        self._untidy = False
        """Whether `tidy` will be called."""
        self._holds = settings.hold_streams
        """Whether streams stay until their requests end. A drain ends this."""

    @property
    def max_message_bytes(self) -> int:
        """The longest message. A longer message holds nonsense, or a body that is refused anyway."""
        return 2 * self.context.settings.max_body_bytes + MESSAGE_SLACK_BYTES

    def begin(self, stream: HttpStream, call: Caller, *, now: float) -> None:
        """Take in a stream whose first message has come."""
        self.live[stream], self.last_began = call, now
        stream.hold = self._holds
        picker = self.picker
        if picker.policy is not self.policy or picker.flow_read is not self.flow_read:
            traced = self.context.settings.traced
            self.policy, self.flow_read = picker.policy, picker.flow_read
            self.names = request_names(picker.policy.spec, flow=picker.flow_read, traced=traced)
            self.room()  # flow control may have ended

    def room(self) -> None:
        """Have the gate pumped soon, because a request has ended or has begun to wait, or a drain has begun.
        So other requests may go now, or at another time than before.
        """
        if self.context.gate is not None and self.context.gate.waiting:
            self.on_room()

    def picked(self) -> None:
        """Have the picker tidied up soon, if it is overdue: once for all picks until then, so that this never
        holds the loop for longer than one portion.
        """
        if self.picker.overdue and not self._untidy:
            self._untidy = True
            self.on_pick()

    def tidy(self) -> None:
        self._untidy = False
        self.picker.tidy(now=self.clock())

    def let_go(self, stream: HttpStream, *, now: float) -> None:
        """End the call of a stream that is not held open, since its request no longer needs it."""
        call = self.live.pop(stream)
        stream.close(now=now, goes_on=True)
        self.room()
        call.end(OK)

    def drain(self) -> frozenset[HttpStream]:
        """Let go of every stream that has answered response headers, now and from now on. Return the streams
        whose requests waited in the gate until now.
        """
        self._holds = False
        now = self.clock()
        waited = frozenset(stream for stream in self.live if stream.phase is Phase.WAITING)
        if self.context.gate is not None:
            self.context.gate.drain(now=now)
            self.picker.tidy(now=now)
            self.room()
        for stream in list(self.live):
            stream.hold = False
            if stream.can_detach:
                self.let_go(stream, now=now)
        return waited

    def fault(self, reason: str) -> None:
        """Report that the data plane sent something that could not be understood."""
        self.picker.report(ProtocolFault(reason))


class Conversation(Handler):
    """Handles one call. The transport calls `message` for each message. At the end the transport calls
    `half_closed` if the data plane has ended its side in good order, otherwise `gone`.
    """

    __slots__ = ("_call", "_stream", "_streams")

    urgent = True

    def __init__(self, streams: LiveStreams, call: Caller) -> None:
        context = streams.context
        self._streams = streams
        self._call = call
        trace = bounded_trace(call.trace) if context.settings.traced else ""
        self._stream = HttpStream(context, deliver=self._send, trace=trace)

    def message(self, data: bytes, *, now: float) -> None:
        stream, streams = self._stream, self._streams
        awaits_pick = stream.pick is None
        if awaits_pick and not self._still_wanted(stream, now=now):
            return
        try:
            self._send(stream.receive(decode(data, names=streams.names), now=now))
        except StreamProtocolError as error:
            streams.fault(error.reason)
            self._call.end(INVALID_ARGUMENT, error.reason)
            self.gone(now=now, broken=False)
            return
        if awaits_pick:
            if stream.pick is not None:
                streams.picked()
            elif stream.phase is Phase.WAITING:
                streams.room()
        if stream.passes:
            self._call.reply(echoes_in)
        if not stream.hold and stream.can_detach:
            streams.let_go(stream, now=now)

    def half_closed(self, *, now: float) -> None:
        self._call.end(OK)
        self._streams.live.pop(self._stream, None)
        self._stream.half_close(now=now)
        self._room()

    def gone(self, *, now: float, broken: bool) -> None:
        """Release the stream. Idempotent."""
        self._streams.live.pop(self._stream, None)
        self._stream.close(now=now, broken=broken)
        self._room()

    def _room(self) -> None:
        if self._streams.picker.flow_decides:
            self._streams.room()

    def _still_wanted(self, stream: HttpStream, *, now: float) -> bool:
        """Return whether the data plane would use a pick. If the message has waited for too long, the body is
        not read.
        """
        call, streams = self._call, self._streams
        if not call.is_open:
            return False
        if stream in streams.live:
            late = streams.overload.late(waited_s=call.waited_s(), now=now)
        else:
            streams.begin(stream, call, now=now)
            late = streams.overload.skips(waited_s=call.waited_s(), now=now)
        if late:
            stream.note_overload()
        return True

    def _send(self, actions: Sequence[Action]) -> None:
        """Send answers: those to a message, or later those to a request that waited."""
        for action in actions:
            self._call.send(encode(action))
