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
"""Room for what surrounds a body in its message."""


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
        """A longer message holds a body that is refused anyway, or nonsense."""
        return 2 * self.settings.max_body_bytes + MESSAGE_SLACK_BYTES

    def answer_unread(self, data: bytes, *, now: float) -> bytes | None:
        """The answer to the first message of a stream that there is no time for; the stream ends with it.
        None: it must be opened.
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

        trace: the `traceparent` of the call itself, which a data plane sends that traces.
        unread: the picker has too much to do to read it.

        let_go: called when a drain ended it, so that the transport ends it with OK.
        deliver: called with answers that come later than the message they belong to.
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
        """Eviction after a pick, once its answer is written."""
        if self._untidied:
            self._untidied = False
            self.picker.housekeep(now=self.clock())

    def picked(self) -> None:
        self._untidied = True

    def room(self) -> None:
        """A request has ended or begun to wait: others may go, or go at another time."""
        if self.gate is not None and self.gate.waiting:
            self.on_room()

    def wanted(self) -> frozenset[str]:
        """Names of the request headers to decode; they follow the policy."""
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
    """One stream. `receive` each message; when `may_end`, `detach` and end it with OK;
    `close` at the end, whatever happened.

    `half_close` is the end that the data plane makes in good order.
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
        """The answers to one message. StreamProtocolError: end the stream with its reason."""
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
        """The stream is not needed any more: it has answered, and is not held."""
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
        """Idempotent. broken: the picker itself failed."""
        self._streams.live.discard(self)
        self.stream.close(now=now, broken=broken)
        self._streams.room()


def _new_request_id() -> str:
    return uuid.uuid4().hex
