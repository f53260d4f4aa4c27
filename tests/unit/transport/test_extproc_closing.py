"""When a connection to a data plane is cut, and how our side of it ends."""

from __future__ import annotations

import asyncio

import pytest

from epp.transport.closing import Closing


class Side(asyncio.Transport):
    """Our side of a connection. Notes what is done with it."""

    def __init__(self, *, can_half_close: bool = True, peer_is_gone: bool = False) -> None:
        super().__init__()
        self._can_half_close = can_half_close
        self._peer_is_gone = peer_is_gone
        self.done: list[str] = []

    def can_write_eof(self) -> bool:
        return self._can_half_close

    def write_eof(self) -> None:
        if self._peer_is_gone:
            raise OSError("the socket is not connected")
        self.done.append("write_eof")

    def resume_reading(self) -> None:
        self.done.append("resume_reading")

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")


def test_peer_that_lets_our_bytes_wait_for_over_thirty_seconds_never_reads() -> None:
    closing = Closing()
    assert not closing.never_reads(now=1000.0)
    closing.unread_since = 1000.0
    assert not closing.never_reads(now=1030.0)
    assert closing.never_reads(now=1030.1)
    closing.unread_since = None
    assert not closing.never_reads(now=1030.1)


def test_peer_has_one_second_to_close_its_side_from_the_first_end_of_ours() -> None:
    closing, side = Closing(), Side()
    assert not closing.is_over(now=1000.0)
    closing.begin(side, now=1000.0)
    closing.begin(side, now=1000.9)
    assert not closing.is_over(now=1001.0)
    assert closing.is_over(now=1001.1)
    assert side.done == ["write_eof", "resume_reading"]


@pytest.mark.parametrize(
    ("side", "done"), [(Side(can_half_close=False), "close"), (Side(peer_is_gone=True), "abort")]
)
def test_a_side_that_cannot_end_alone_is_closed_or_cut(side: Side, done: str) -> None:
    Closing().begin(side, now=1000.0)
    assert side.done == [done]
