"""Connects a transport with the state machine of ext_proc streams: takes the bytes of one message, and
returns the bytes of its answers.

Owns the streams in flight of any transport, and their part of the drain. Synchronous: a message is handled
completely before the next one, so requests never interleave inside the picker.

Invariant: however a stream ends, its `HttpStream` is closed, so that no booking outlives it.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from epp.config.flow import Flow
from epp.config.policy import Policy
from epp.decision import Observer
from epp.extproc.access_log import AccessLog
from epp.extproc.codec import decode, echo_of, encode
from epp.extproc.events import Action
from epp.extproc.overload import Overload
from epp.extproc.phases import Phase
from epp.extproc.reading import RESPONSE_NAMES, bounded_trace, request_names
from epp.extproc.response import PickerPort, StreamSettings
from epp.extproc.stream import HttpStream
from epp.extproc.unread import Unread
from epp.gate import Gate

MESSAGE_SLACK_BYTES: Final = 2**20
"""Bytes for the fields around a body in its message."""


class Streams:
    """All streams of one server."""

    def __init__(
        self,
        picker: PickerPort,
        observer: Observer,
        *,
        settings: StreamSettings,
        clock: Callable[[], float],
        gate: Gate | None = None,
    ) -> None:
        self.picker = picker
        self.gate = gate
        self.observer = observer
        self.settings = settings
        self.clock = clock
        self.live: set[Conversation] = set()
        self.overload = Overload()
        self.access_log = AccessLog(picker, observer.protocol_error)
        self._unread = Unread(picker, timer=time.perf_counter)
        self._policy: Policy | None = None
        self._read: Flow | None = None
        self._names: frozenset[str] = frozenset()
        self._untidied = False
        self.on_room: Callable[[], None] = lambda: None
        """Called when the gate should be pumped soon."""

    @property
    def max_message_bytes(self) -> int:
        """The longest message. A longer one holds nonsense, or a body that is refused anyway."""
        return 2 * self.settings.max_body_bytes + MESSAGE_SLACK_BYTES

    def answer_unread(self, data: bytes, *, now: float) -> bytes | None:
        """The answer to the first message of a stream that the picker has no time to read. The stream ends
        with this answer. None: the stream must be opened.
        """
        return self._unread.answer(data, names=self.wanted(), settings=self.settings, now=now)

    def open(
        self,
        let_go: Callable[[], None],
        deliver: Callable[[Sequence[bytes]], None],
        *,
        trace: str = "",
        unread: bool = False,
    ) -> Conversation:
        """A stream began.

        trace: the `traceparent` of the gRPC call itself; data planes that trace send it.

        unread: the picker has too much work to read the body.

        let_go: called when a drain has ended the stream, so that the transport ends the call with OK.

        deliver: called with answers that are ready only after the message that they answer was handled.
        """
        traced = bounded_trace(trace) if self.settings.traced else ""
        conversation = Conversation(self, let_go, deliver, trace=traced, unread=unread)
        self.live.add(conversation)
        return conversation

    def drain(self) -> None:
        """Let go of every stream that has answered response headers, now and from now on."""
        self.settings = dataclasses.replace(self.settings, hold_streams=False)
        now = self.clock()
        if self.gate is not None:
            self.gate.drain(now=now)
        for conversation in list(self.live):
            conversation.stream.hold = False
            if conversation.may_end:
                conversation.detach(now=now)
                conversation.let_go()

    def tidy(self) -> None:
        """Evict after a pick, once the answer is written."""
        if self._untidied:
            self._untidied = False
            self.picker.tidy(now=self.clock())

    def picked(self) -> None:
        self._untidied = True

    def room(self) -> None:
        """A request has ended or has begun to wait. So other requests may now go, or may go at
        another time.
        """
        if self.gate is not None and self.gate.waiting:
            self.on_room()

    def wanted(self) -> frozenset[str]:
        """The names of the request headers to decode. They depend on the policy."""
        policy = self.picker.policy
        read = self.gate.read if self.gate is not None else None
        if policy is not self._policy or read is not self._read:
            self._policy, self._read = policy, read
            self._names = request_names(policy.spec, read=read, traced=self.settings.traced)
        return self._names

    def check_integrity(self) -> None:
        for conversation in self.live:
            conversation.stream.check_integrity()


class Conversation:
    """One stream. `receive` each message. When `may_end` is true, `detach` and end the call with OK. Call
    `close` at the end, whatever happened.

    `half_close` is for the orderly end by the data plane.
    """

    __slots__ = ("_deliver", "_names", "_streams", "let_go", "picked", "stream")

    def __init__(
        self,
        streams: Streams,
        let_go: Callable[[], None],
        deliver: Callable[[Sequence[bytes]], None],
        *,
        trace: str,
        unread: bool,
    ) -> None:
        self._streams = streams
        self._deliver = deliver
        self._names = streams.wanted()
        self.picked = False
        self.let_go = let_go
        self.stream = HttpStream(
            streams.picker,
            streams.observer,
            settings=streams.settings,
            new_request_id=_new_request_id,
            timer=time.perf_counter,
            unread=unread,
            gate=streams.gate,
            deliver=self._later,
            trace=trace,
        )

    def receive(self, data: bytes, *, now: float) -> Sequence[bytes]:
        """The answers to one message. StreamProtocolError: end the stream with the error's reason."""
        stream = self.stream
        if stream.passes and (echo := echo_of(data)) is not None:
            return (echo,)
        event = decode(
            data, names=self._names, response_names=RESPONSE_NAMES, first=stream.phase is Phase.START
        )
        answers = [encode(action) for action in stream.receive(event, now=now)]
        if not self.picked and stream.pick is not None:
            self.picked = True
            self._streams.picked()
        if stream.phase is Phase.WAITING:
            self._streams.room()
        return answers

    def _later(self, actions: Sequence[Action]) -> None:
        """Flow control has decided on a request that waited."""
        if self.stream.pick is not None:
            self.picked = True
            self._streams.picked()
        self._deliver([encode(action) for action in actions])

    @property
    def may_end(self) -> bool:
        """The stream is no longer needed: everything is answered, and the stream is not held open."""
        return not self.stream.hold and self.stream.can_detach

    def detach(self, *, now: float) -> None:
        self._streams.live.discard(self)
        self.stream.detach(now=now)
        self._streams.room()

    def half_close(self, *, now: float) -> None:
        """The data plane has ended its side in good order."""
        self._streams.live.discard(self)
        self.stream.half_close(now=now)
        self._streams.room()

    def close(self, *, now: float, broken: bool = False) -> None:
        """Release the stream. Idempotent. broken: the picker itself failed."""
        self._streams.live.discard(self)
        self.stream.close(now=now, broken=broken)
        self._streams.room()


def _new_request_id() -> str:
    return uuid.uuid4().hex
