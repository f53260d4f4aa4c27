"""The events that a connection gives to its owner. An opened call ends exactly once: by `Gone`, or by the
owner's own `end`.
"""

from __future__ import annotations

from msgspec import Struct

from epp.http2.headers import Request


class Opened(Struct, frozen=True, gc=False):
    stream_id: int
    request: Request


class Message(Struct, frozen=True, gc=False):
    """One gRPC message, whole, without its prefix."""

    stream_id: int
    data: bytes


class HalfClosed(Struct, frozen=True, gc=False):
    """The peer has sent all that it will."""

    stream_id: int


class Gone(Struct, frozen=True, gc=False):
    """The call is over without the owner's doing.
    `reason`: `reset` where the peer ended it, else the name of a fault.
    """

    stream_id: int
    reason: str


class Fault(Struct, frozen=True, gc=False):
    """The peer did what a stream or the connection does not survive, or opened what is no call.
    To be counted.
    """

    reason: str


class Over(Struct, frozen=True, gc=False):
    """The connection must be closed once what is to be sent is sent."""

    reason: str


Event = Opened | Message | HalfClosed | Gone | Fault | Over
