"""Connections that fail after they were accepted, over real sockets."""

from __future__ import annotations

import asyncio
import socket

from epp.transport.accepting import Acceptor


async def test_a_connection_that_fails_at_its_beginning_stops_no_other() -> None:
    async def fail(_: socket.socket) -> None:
        raise ConnectionResetError

    acceptor = Acceptor(fail)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    acceptor.start(listener)
    for _ in range(2):
        with socket.create_connection(address) as client:
            client.setblocking(False)
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 30) == b""
    await acceptor.stop()
    assert not acceptor.listening


async def test_a_connection_without_room_is_closed_at_once() -> None:
    welcomed: list[socket.socket] = []
    faults: list[str] = []

    async def welcome(sock: socket.socket) -> None:
        welcomed.append(sock)

    acceptor = Acceptor(welcome, has_room=lambda *_: False, on_fault=faults.append)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    acceptor.start(listener)
    with socket.create_connection(address) as client:
        client.setblocking(False)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 30) == b""
    await acceptor.stop()
    assert (welcomed, faults) == ([], ["too_many_connections"])
