"""What a service of gRPC and its transport know of each other: the handler of a call, and its caller."""

from __future__ import annotations

from typing import Protocol

from epp.http2.messages import OK, Reply


class Handler:
    """One call, as its service handles it.

    No method is called after `gone`, or after the handler has ended the call.
    """

    __slots__ = ()

    def message(self, data: bytes, *, now: float) -> None:
        """Called when a message of the caller came."""
        raise NotImplementedError

    def half_closed(self, *, now: float) -> None:
        """Called when the caller has sent its last message."""

    def gone(self, *, now: float, broken: bool) -> None:
        """Called when the call ended, but the handler did not end it. broken: the handler itself failed."""


class Caller(Protocol):
    """What a transport lets a handler do with its call. `epp.extproc.peer.Call` is one."""

    @property
    def is_open(self) -> bool:
        """Whether an answer can still reach the caller."""

    @property
    def trace(self) -> str:
        """The trace context of the call itself, as its headers have it. Data planes that trace send it."""

    def waited_s(self) -> float:
        """Return how long, at most, the current message has waited for this process."""

    def send(self, message: bytes) -> None: ...
    def reply(self, reply: Reply) -> None:
        """Answer the next messages by `reply`, without the handler, until it has no answer to one."""

    def end(self, status: int = OK, details: str = "") -> None: ...
