"""The invariants of the picker's server, of its HTTP/2 connections and of their streams (`epp/transport`)."""

from epp.transport.http2.connection import Connection
from epp.transport.http2.messages import memory_bytes
from epp.transport.http2.streams import _LATELY, StreamTable
from epp.transport.http2_server import Http2Server
from epp.transport.peer import Peer
from epp.transport.server import ExtProcServer
from tests.invariants.protocol import check_streams


def check_server(server: ExtProcServer) -> None:
    check_streams(server.streams)
    if isinstance(server.transport, Http2Server):  # gRPC keeps the state of its own connections
        for peer in server.transport.peers:
            check_peer(peer)


def check_peer(peer: Peer) -> None:
    check_connection(peer.connection)
    waiting = [*peer._of_begun, *peer._of_new]
    assert peer.waiting_bytes == sum(memory_bytes(event) for _, _, event in waiting)
    assert len(waiting) >= sum(call.waiting for call in peer._calls.values())
    assert not any(call.begun for _, call, _ in peer._of_new)
    assert not peer._calls or peer not in peer.source.idle


def check_connection(connection: Connection) -> None:
    _check_table(connection._table)
    assert not (connection.over and connection.streams)


def _check_table(table: StreamTable) -> None:
    assert table.our_window <= table.limits.connection_window_bytes
    for number, stream in table.by_number.items():
        assert number == stream.number <= table.last_id
        assert 0 <= stream.window <= table.limits.stream_window_bytes
        assert stream.end is None or stream.backlog or stream in table.lingering
    assert {*table.lingering, *table.stalled, *table.waiting} <= {*table.by_number.values()}
    assert table.own.unsent == sum(len(stream.backlog or b"") for stream in table.by_number.values())
    assert len(table.lately) <= _LATELY
