"""The interfaces between a service of gRPC and its transport: the handler of a call, and its caller."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from epp.transport.http2.messages import OK, Reply


class Handler:
    """One call, as its service handles it.

    No method is called after `gone`, or after the handler has ended the call.
    """

    __slots__ = ()

    urgent: ClassVar[bool] = False
    """Whether connections with such calls go before others."""

    def message(self, data: bytes, *, now: float) -> None:
        """Handle a message of the caller."""
        raise NotImplementedError

    def half_closed(self, *, now: float) -> None:
        """Take in that the caller has sent its last message."""

    def gone(self, *, now: float, broken: bool) -> None:
        """Take in that the call ended without the handler. broken: the handler itself failed."""


class Caller(Protocol):
    """The side of a call that a transport gives to the handler. `epp.transport.peer.Call` is one
    implementation.
    """

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
        """Answer the next messages by `reply`, without the handler, until `reply` has no answer for one."""

    def end(self, status: int = OK, details: str = "") -> None: ...


Service = Callable[[Caller], Handler]
"""Makes the handler of each call of a method."""
