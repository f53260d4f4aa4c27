"""The events that a connection gives to its owner. An opened call ends exactly once: by `Gone`, or by the
owner's own `end`.
"""

from __future__ import annotations

from msgspec import Struct

from epp.transport.http2.headers import Request


class Opened(Struct, frozen=True, gc=False):
    stream_id: int
    request: Request


class Message(Struct, frozen=True, gc=False):
    """One gRPC message, whole, without its prefix."""

    stream_id: int
    data: bytes


class HalfClosed(Struct, frozen=True, gc=False):
    """The peer has ended its side of the stream."""

    stream_id: int


class Gone(Struct, frozen=True, gc=False):
    """The call has ended, but its owner did not end it. `reason`: `reset` if the peer reset it, else the
    fault.
    """

    stream_id: int
    reason: str


class Fault(Struct, frozen=True, gc=False):
    """The peer broke a rule and so lost a stream or the connection, or it opened a stream that is not a gRPC
    call. This event is for the metrics.
    """

    reason: str


class Over(Struct, frozen=True, gc=False):
    """The owner must send what is left to send, and then close the connection."""

    reason: str


Event = Opened | Message | HalfClosed | Gone | Fault | Over
