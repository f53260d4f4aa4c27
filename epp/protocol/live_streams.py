"""Holds the parts that all ext_proc calls of one server share: the calls in flight, the names of the headers
to decode, the measure of overload, and the access logs. Drains the calls. Works for any transport.

`conversation` handles the calls, and reads these parts as plain attributes. The methods run only now and
then: at a change of the policy, while flow control is on, and at a drain.
"""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import Callable
from typing import Final

from epp.config.flow import Flow
from epp.config.policy import Policy
from epp.picker.events import ProtocolFault
from epp.picker.gate import Gate
from epp.picker.phases import Phase
from epp.picker.picker import Picker
from epp.protocol.access_log import AccessLog
from epp.protocol.asking import request_names
from epp.protocol.calls import Caller
from epp.protocol.overload import Overload
from epp.protocol.stream import HttpStream
from epp.protocol.stream_settings import StreamContext, StreamSettings
from epp.transport.http2.grpc_messages import OK

MESSAGE_SLACK_BYTES: Final = 2**20
"""Bytes for the fields around a body in its message."""


class LiveStreams:
    """All streams of one server."""

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
            picker, settings, new_request_id=_new_request_id, timer=time.perf_counter, gate=gate
        )
        self.clock = clock
        self.live: dict[HttpStream, Caller] = {}
        """The streams in flight, with their calls."""
        self.last_began = -math.inf
        """When the newest stream began."""
        self.overload = Overload()
        self.access_log = AccessLog(picker, self.fault)
        self.policy: Policy | None = None
        self.flow_read: Flow | None = None
        self.names: frozenset[str] = frozenset()
        """The names of the request headers to decode, by `policy` and `flow_read`. Call `renew` if the picker
        has others now.
        """
        self.on_room: Callable[[], None] = lambda: None
        """A function that is called when the gate should be pumped soon."""

    @property
    def max_message_bytes(self) -> int:
        """The longest message. A longer message holds nonsense, or a body that is refused anyway."""
        return 2 * self.context.settings.max_body_bytes + MESSAGE_SLACK_BYTES

    def renew(self) -> None:
        """Take the names of headers from the picker's policy. Requests that wait may go now, because flow
        control may have ended.
        """
        picker, traced = self.picker, self.context.settings.traced
        self.policy, self.flow_read = picker.policy, picker.flow_read
        self.names = request_names(picker.policy.spec, flow=picker.flow_read, traced=traced)
        self.room()

    def room(self) -> None:
        """Have the gate pumped soon, because a request has ended or has begun to wait, or a drain has begun.
        So other requests may go now, or at another time than before.
        """
        if self.context.gate is not None and self.context.gate.waiting:
            self.on_room()

    def let_go(self, stream: HttpStream, *, now: float) -> None:
        """End the call of a stream that is not held open, since its request no longer needs it."""
        call = self.live.pop(stream)
        stream.detach(now=now)
        self.room()
        call.end(OK)

    def drain(self) -> frozenset[HttpStream]:
        """Let go of every stream that has answered response headers, now and from now on. Return the streams
        whose requests waited in the gate until now.
        """
        settings = dataclasses.replace(self.context.settings, hold_streams=False)
        self.context = dataclasses.replace(self.context, settings=settings)
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

    def check_integrity(self) -> None:
        for stream in self.live:
            stream.check_integrity()


def _new_request_id() -> str:
    return uuid.uuid4().hex
