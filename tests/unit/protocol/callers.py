"""The transport's side of a call, as the tests of calls need it."""

from __future__ import annotations

from epp.transport.http2.messages import OK, Reply


class NotingCaller:
    """A `Caller` that notes the answers, how often a message left work, and the end of the call."""

    is_open = True
    trace = ""

    def __init__(self, *, waited_s: float = 0.0) -> None:
        self._waited_s = waited_s
        self.sent: list[bytes] = []
        self.left_work = 0
        self.ended: list[tuple[int, str]] = []

    def waited_s(self) -> float:
        return self._waited_s

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def reply(self, reply: Reply) -> None: ...

    def leaves_work(self) -> None:
        self.left_work += 1

    def end(self, status: int = OK, details: str = "") -> None:
        self.ended.append((status, details))
