"""The server of our own HTTP/2: which connections it keeps, and what a stop does to newcomers."""

import asyncio
import resource
from collections.abc import Iterator

import pytest

from epp.base.types import Address
from epp.config.sections import Listen
from epp.protocol.calls import Handler
from epp.transport.http2.frames import Limits
from epp.transport.http2_server import Http2Server, max_peers
from epp.transport.peer import Peer
from tests.harness.arriving import TURNS, connect_and_stop
from tests.harness.http2_frames import PATH, headers, hello, reset, window_update
from tests.harness.pipe import Pipe
from tests.invariants.transport import check_peer


def server_of(faults: list[str], *, max_peers: int = 10) -> Http2Server:
    return Http2Server(
        {PATH: lambda _: Handler()},
        limits=Limits(max_message_bytes=2**20),
        max_held_bytes=2**20,
        max_peers=max_peers,
        clock=lambda: 100.0,
        on_fault=faults.append,
    )


@pytest.mark.parametrize("turns", TURNS)
async def test_a_connection_that_arrives_at_a_stop_is_closed_quietly(turns: int) -> None:
    faults: list[str] = []
    server = server_of(faults)
    port = await server.start(Listen(address="127.0.0.1:0"))
    await connect_and_stop(Address("127.0.0.1", port), lambda: server.stop(0.0), turns=turns)
    assert (server.peers, faults) == (set(), [])


class From(Pipe):
    """The transport of a peer at a given address. Empty: at a unix socket."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ((self.address, 50_000) if self.address else "") if name == "peername" else default


def arrive(server: Http2Server, *addresses: str, calls: bool = False) -> list[From]:
    """Let peers connect, as far as there is room. Return their transports. calls: each opens a call."""
    wires = []
    for address in addresses:
        if server.make_room(0, address):
            peer, wire = Peer(server), From(address)
            peer.connection_made(wire)
            peer.data_received(hello() + (headers(1) if calls else b""))
            check_peer(peer)
            wires.append(wire)
    return wires


async def test_the_longest_idle_connection_of_the_largest_address_gives_way() -> None:
    faults: list[str] = []
    server = server_of(faults, max_peers=5)
    (envoy,) = arrive(server, "10.0.0.1")
    busy = arrive(server, "10.0.0.2", calls=True)
    idle = arrive(server, "10.0.0.3", "10.0.0.3", "10.0.0.4")
    assert len(arrive(server, "10.0.0.5")) == 1
    assert [wire.closed for wire in (envoy, *busy, *idle)] == [False, False, True, False, False]
    assert (faults, len(server.peers)) == (["idle_connection_closed"], 5)


async def test_a_newcomer_is_refused_only_where_every_connection_has_calls() -> None:
    server = server_of([], max_peers=2)
    wires = arrive(server, "10.0.0.1", "10.0.0.2", "10.0.0.3", calls=True)
    assert [wire.closed for wire in wires] == [False, False]


async def test_a_connection_is_idle_again_when_its_last_call_has_ended() -> None:
    server = server_of([], max_peers=2)
    (first,) = arrive(server, "10.0.0.1", calls=True)
    peer = next(iter(server.peers))
    arrive(server, "10.0.0.2", calls=True)
    peer.data_received(reset(1))
    assert len(arrive(server, "10.0.0.3")) == 1
    assert first.closed


async def test_one_address_has_half_of_the_connections_and_pays_for_more() -> None:
    server = server_of([], max_peers=8)
    wires = arrive(server, "10.0.0.2", *["10.0.0.1"] * 6)
    assert [wire.closed for wire in wires] == [False, True, True, False, False, False, False]
    assert len(arrive(server, *[""] * 8)) == 8, "a unix socket has no addresses"


async def test_the_connection_with_most_unread_answers_is_closed() -> None:
    faults: list[str] = []
    server = server_of(faults)
    few, _ = arrive(server, "10.0.0.1", "10.0.0.2", calls=True)
    for peer in server.peers:
        peer.connection.send(1, bytes(100_000 if peer.transport is few else 2**21))
    assert server.held.unsent > server.held.most
    for peer in list(server.peers):
        peer.data_received(window_update(0, 1))
    assert faults == ["answers_unread"]
    assert server.held.unsent < 100_000
    assert not few.closed


async def test_the_time_limits_of_many_peers_are_checked_over_several_turns() -> None:
    server = server_of([], max_peers=500)
    await server.start(Listen(address="127.0.0.1:0"))
    wires = arrive(server, *[""] * 200)
    greeted, server.now = len(wires[0].writes), lambda: 200.0
    checked = {0}
    async with asyncio.timeout(30):
        while max(checked) < len(wires):
            await asyncio.sleep(0)
            checked.add(sum(len(wire.writes) > greeted for wire in wires))
    await server.stop(0.0)
    assert len(checked) > 2


@pytest.fixture
def limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(("files", "peers"), [(600, 300), (300, 44), (256, 1)])
def test_the_limit_of_connections_leaves_descriptors_for_other_files(files: int, peers: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    assert max_peers() == peers
