"""The server of our own HTTP/2, on a real socket: what happens to a connection that arrives at a stop."""

from __future__ import annotations

import socket
import time

import pytest

from epp.extproc.http2_server import Http2Server
from epp.http2.limits import Limits
from epp.types import Address
from tests.harness.arriving import TURNS, connect_and_stop


@pytest.mark.parametrize("turns", TURNS)
async def test_a_connection_that_arrives_while_the_server_stops_is_closed_without_an_error(
    turns: int,
) -> None:
    faults: list[str] = []
    server = Http2Server(
        {},
        limits=Limits(max_message_bytes=2**20),
        max_held_bytes=2**20,
        max_peers=10,
        clock=time.monotonic,
        on_fault=faults.append,
        after_writing=lambda **_: None,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    address = Address(*listener.getsockname())
    server.start(listener)
    await connect_and_stop(address, lambda: server.stop(0.0), turns=turns)
    assert (server.peers, faults) == (set(), [])
