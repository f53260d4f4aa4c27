"""One connection of the picker's HTTP/2 in simulated time: the order of its messages."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest

from epp.protocol.calls import Caller, Handler, Service
from epp.transport import peer as peer_module
from epp.transport.http2.frames import PREFACE, Limits
from epp.transport.http2.messages import HeldBytes
from epp.transport.http2_server import Http2Server
from epp.transport.peer import Peer
from epp.transport.turns import AddressTurns, Turns
from tests.harness.http2_frames import PATH, data, grpc, headers, hello, reset
from tests.harness.pipe import Pipe
from tests.invariants.transport import check_peer


@dataclass
class PeerServer:
    """The parts of a server that a peer needs. Each message takes `takes_s`, and is noted with the number
    of its call and its text.
    """

    takes_s: float = 0.0
    now_s: float = 10.0
    handled: list[tuple[int, bytes]] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    opened: int = 0
    limits: Limits = field(default_factory=lambda: Limits(max_message_bytes=2**20))
    held: HeldBytes = field(default_factory=lambda: HeldBytes(2**24))
    sources: dict[str, AddressTurns] = field(default_factory=dict)
    unsent: int = 0

    def __post_init__(self) -> None:
        self.turns = Turns(self.now)
        self.services: Mapping[str, Service] = {PATH: lambda call: Noting(call, self)}

    def now(self) -> float:
        return self.now_s

    def fault(self, reason: str) -> None:
        raise AssertionError(reason)

    def came(self, peer: Peer, address: str) -> AddressTurns:
        source = self.sources.setdefault(address, AddressTurns(address))
        source.guests.add(peer)
        return source

    def left(self, peer: Peer) -> None:
        peer.source.guests.discard(peer)

    def too_much_unsent(self) -> None:
        self.unsent += 1


class Noting(Handler):
    urgent = True

    def __init__(self, call: Caller, server: PeerServer) -> None:
        self._call = call
        self._server = server
        self._number = 2 * server.opened + 1
        server.opened += 1

    def message(self, data: bytes, *, now: float) -> None:
        server = self._server
        server.handled.append((self._number, data))
        server.waited_s.append(self._call.waited_s())
        server.now_s += server.takes_s


def peer_of(server: PeerServer) -> tuple[Peer, Pipe]:
    peer, wire = Peer(cast("Http2Server", server)), Pipe()
    peer.connection_made(wire)
    peer.data_received(hello())
    return peer, wire


def opens_call(number: int, text: bytes = b"first") -> bytes:
    return headers(number) + data(number, grpc(text))


async def turns(peer: Peer, server: PeerServer) -> None:
    """Run until there is nothing left to do."""
    before = -1
    while before != (before := len(server.handled)):
        await asyncio.sleep(0)
        check_peer(peer)


async def test_messages_of_open_calls_are_handled_before_new_calls() -> None:
    server = PeerServer()
    peer, _ = peer_of(server)
    peer.data_received(opens_call(1))
    peer.data_received(opens_call(3) + opens_call(5) + data(1, grpc(b"second")))
    assert server.handled == [(1, b"first"), (1, b"second"), (3, b"first"), (5, b"first")]


async def test_new_calls_get_as_much_time_as_open_calls() -> None:
    """The messages of other calls never end. New calls are begun all the same, and their waits count from
    their arrival.
    """
    server = PeerServer(takes_s=0.001)
    peer, wire = peer_of(server)
    peer.data_received(opens_call(1))
    await turns(peer, server)
    peer.data_received(b"".join(opens_call(n) for n in range(3, 41, 2)))
    at_first = len(server.handled)
    assert 1 < at_first < 10, "the rest waits for later turns of the loop"
    assert wire.reads, "messages of open calls must not wait for new calls"
    while sum(text == b"first" for _, text in server.handled) < 20:
        peer.data_received(data(1, grpc(b"more")) * 10)
        await asyncio.sleep(0)
    begun = [index for index, (_, text) in enumerate(server.handled) if text == b"first"]
    others = len(server.handled) - len(begun)
    assert len(begun) == 20
    assert others < 4 * len(begun)
    waits = [server.waited_s[index] for index in begun[1:]]
    assert waits == sorted(waits), "the call that is begun last has waited longest"
    assert waits[-1] > 0.015


class Unhurried(Noting):
    urgent = False


async def test_a_peer_without_ext_proc_calls_has_short_turns() -> None:
    """However many health checks it sends, others wait for a millisecond."""
    server = PeerServer(takes_s=0.0001)
    server.services = {PATH: lambda call: Unhurried(call, server)}
    peer, _ = peer_of(server)
    peer.data_received(b"".join(opens_call(n) for n in range(1, 201, 2)))
    assert 1 < len(server.handled) <= 12
    await turns(peer, server)
    assert len(server.handled) == 100


class Echoing(Noting):
    """Begins its answer with the first message, and answers every later message with a reply."""

    def message(self, data: bytes, *, now: float) -> None:
        super().message(data, now=now)
        self._call.send(b"begun")
        self._call.reply(lambda data, at, end: data[at:end])


async def test_messages_that_have_a_reply_reach_no_handler() -> None:
    server = PeerServer()
    server.services = {PATH: lambda call: Echoing(call, server)}
    peer, wire = peer_of(server)
    peer.data_received(headers(1) + data(1, grpc(b"first")))
    peer.data_received(data(1, grpc(b"second")))
    assert server.handled == [(1, b"first")]
    assert wire.written.endswith(data(1, grpc(b"second")))


async def test_no_reply_overtakes_the_messages_that_wait_in_the_line() -> None:
    server = PeerServer(takes_s=0.01)
    server.services = {PATH: lambda call: Echoing(call, server)}
    peer, wire = peer_of(server)
    peer.data_received(opens_call(1) + data(1, grpc(b"waits")))
    assert server.handled == [(1, b"first")], "a turn is over, and the second message is still in the line"
    peer.data_received(data(1, grpc(b"last")))
    await turns(peer, server)
    assert server.handled[1:] == [(1, b"waits"), (1, b"last")]
    assert data(1, grpc(b"last")) not in wire.written
    peer.data_received(data(1, grpc(b"alone")))
    assert wire.written.endswith(data(1, grpc(b"alone")))


async def test_a_new_call_that_is_reset_in_the_line_is_never_begun() -> None:
    server = PeerServer(takes_s=0.01)
    peer, _ = peer_of(server)
    peer.data_received(opens_call(1) + opens_call(3) + opens_call(5))
    peer.data_received(reset(3))
    await turns(peer, server)
    assert [number for number, _ in server.handled] == [1, 5]


async def test_the_end_of_a_call_is_handled_after_its_messages() -> None:
    server = PeerServer(takes_s=0.01)
    peer, _ = peer_of(server)
    ended: list[int] = []
    server.services = {PATH: lambda call: Ending(call, server, ended)}
    wire = b"".join(headers(n) + data(n, grpc(b"a")) + data(n, grpc(b"b"), ends=True) for n in (1, 3))
    peer.data_received(wire)
    await turns(peer, server)
    assert server.handled == [(1, b"a"), (1, b"b"), (3, b"a"), (3, b"b")]
    assert ended == [1, 3]


class Ending(Noting):
    def __init__(self, call: Caller, server: PeerServer, ended: list[int]) -> None:
        super().__init__(call, server)
        self._ended = ended

    def half_closed(self, *, now: float) -> None:
        self._ended.append(self._number)


async def test_nothing_is_read_while_new_calls_hold_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "_MOST_WAITING_BYTES", 50_000)
    server = PeerServer(takes_s=0.01)
    peer, wire = peer_of(server)
    peer.data_received(opens_call(1) + opens_call(3) + opens_call(5, bytes(10_000)))
    assert wire.reads
    peer.data_received(b"".join(opens_call(n, bytes(10_000)) for n in range(7, 20, 2)))
    assert not wire.reads
    await turns(peer, server)
    assert wire.reads
    assert len(server.handled) == 10


async def test_the_clock_is_looked_at_after_each_message_and_16_frames() -> None:
    server = PeerServer(takes_s=0.001)
    peer, _ = peer_of(server)
    for number in range(1, 33, 2):
        peer.data_received(opens_call(number))
    await turns(peer, server)
    before = len(server.handled)
    more = [data(number, grpc(b"more")) for number in range(1, 33, 2)]
    peer.data_received(b"".join([*more, *map(opens_call, range(33, 93, 2))]))
    assert len(server.handled) - before <= 5
    assert server.opened == 16, "no frame behind those is read yet"
    await turns(peer, server)
    assert len(server.handled) - before == 46


async def test_bytes_that_come_late_in_an_iteration_wait_for_the_next_one() -> None:
    server = PeerServer(takes_s=0.003)
    peers = [peer_of(server) for _ in range(5)]
    for peer, _ in peers:
        peer.data_received(opens_call(1))
    assert len(server.handled) == 2
    assert [wire.reads for _, wire in peers] == [True, True, False, False, False]
    server.takes_s = 0.0
    for peer, _ in peers:
        await turns(peer, server)
    assert len(server.handled) == 5
    assert all(wire.reads for _, wire in peers)


async def test_bytes_that_come_after_a_pause_may_have_waited_since_its_beginning() -> None:
    server = PeerServer()
    peer, wire = peer_of(server)
    peer.pause_writing()
    assert not wire.reads
    server.now_s += 0.5
    peer.resume_writing()
    await turns(peer, server)
    peer.data_received(opens_call(1))
    peer.data_received(opens_call(3))
    assert server.waited_s == [0.5, 0.0]


async def test_the_end_of_a_begun_call_comes_after_its_messages() -> None:
    server = PeerServer(takes_s=0.003)
    peer, _ = peer_of(server)
    peer.data_received(opens_call(1))
    peer.data_received(data(1, grpc(b"a")) + data(1, grpc(b"b")) + reset(1))
    await turns(peer, server)
    assert server.handled == [(1, b"first"), (1, b"a"), (1, b"b")]
    assert not peer.waiting_bytes


async def test_too_many_unread_answers_are_reported_after_the_turn() -> None:
    server = PeerServer(held=HeldBytes(1000))
    server.services = {PATH: lambda call: Echoing(call, server)}
    peer, _ = peer_of(server)
    peer.data_received(hello(window=0).removeprefix(PREFACE) + opens_call(1))
    assert server.unsent == 0
    server.held.unsent = 1001
    peer.data_received(opens_call(3))
    assert server.unsent == 1


# -- the end of a connection ---------------------------------------------------------------------------------


def test_peer_that_lets_our_bytes_wait_for_over_thirty_seconds_is_cut_off() -> None:
    server = PeerServer()
    peer, wire = peer_of(server)
    peer.pause_writing()
    peer.tick(now=server.now_s + 30.0)
    assert not wire.closed
    with pytest.raises(AssertionError, match="peer_never_reads"):
        peer.tick(now=server.now_s + 30.1)
    peer.connection_lost(None)
    peer.tick(now=server.now_s + 30.6)  # does not count it again: it was due before the end


class HalfClosing(Pipe):
    """A transport whose own side can end alone. Notes what is done with it."""

    def __init__(self, *, peer_is_gone: bool = False) -> None:
        super().__init__()
        self.peer_is_gone = peer_is_gone
        self.ended = 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self.peer_is_gone:
            raise OSError("the socket is not connected")
        self.ended += 1


def test_peer_has_one_second_to_close_its_side_from_the_first_end_of_ours() -> None:
    server, wire = PeerServer(), HalfClosing()
    peer = Peer(cast("Http2Server", server))
    peer.connection_made(wire)
    peer.close()
    server.now_s += 0.9
    peer.close()
    assert (wire.ended, wire.reads, wire.closed) == (1, True, False)
    peer.tick(now=11.0)
    assert not wire.closed
    peer.tick(now=11.1)
    assert wire.closed


@pytest.mark.parametrize("wire", [Pipe(), HalfClosing(peer_is_gone=True)])
def test_a_side_that_cannot_end_alone_is_closed_or_cut(wire: Pipe) -> None:
    peer = Peer(cast("Http2Server", PeerServer()))
    peer.connection_made(wire)
    peer.close()
    assert wire.closed
