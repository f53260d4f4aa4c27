"""The sockets of exact mode, over real ZeroMQ: they never block, bound what they take in, and leave nothing
behind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from epp.base.types import EndpointName
from epp.sources.kvevents import sockets
from epp.sources.kvevents.sequence import Sequence
from epp.sources.kvevents.sockets import (
    MOST_MESSAGE_BYTES,
    Context,
    EventSource,
    Followed,
    Socket,
    Subscription,
)


@pytest.fixture
def context() -> Iterator[Context]:
    made = sockets.new_context()
    yield made
    made.term()  # waits for ever if a socket was left open


def publisher(context: Context, port: int | None = None) -> tuple[Socket, str]:
    server = context.socket(zmq.PUB)
    server.setsockopt(zmq.LINGER, 0)
    if port is None:
        port = server.bind_to_random_port("tcp://127.0.0.1")
    return server, f"tcp://127.0.0.1:{port}"


def heard(server: Socket, sub: Subscription) -> list[bytes]:
    """Publish until the subscription has reached the publisher, and return the first message."""
    while not sub.socket.poll(20):
        server.send_multipart([b"kv", b"first"])
    found = sockets.receive(sub.socket)
    assert found is not None
    return found


def test_a_subscription_hears_its_topic_and_does_not_wait(context: Context) -> None:
    server, address = publisher(context)
    sub = Subscription(context, address, topic="kv")
    assert sockets.receive(sub.socket) is None
    assert heard(server, sub) == [b"kv", b"first"]
    assert not sub.read_out()
    sub.close()
    server.close()


def read_until_ended(sub: Subscription) -> list[bytes]:
    """Read messages until the connection has ended, and return their last frames."""
    found = []
    while not sub.read_out():
        if sub.socket.poll(20):
            message = sockets.receive(sub.socket)
            assert message is not None
            found.append(message[-1])
    return found


def test_an_ended_connection_is_noticed_after_all_its_messages_were_read(context: Context) -> None:
    server, address = publisher(context)
    sub = Subscription(context, address, topic="")
    heard(server, sub)
    server.send_multipart([b"kv", b"last"])
    assert sub.socket.poll(5000)
    server.close()
    assert read_until_ended(sub)[-1] == b"last"
    sub.close()


def test_a_message_over_the_limit_ends_the_connection_and_is_not_read(context: Context) -> None:
    server, address = publisher(context)
    sub = Subscription(context, address, topic="")
    heard(server, sub)
    server.send_multipart([b"big", bytes(MOST_MESSAGE_BYTES + 1)])
    assert set(read_until_ended(sub)) <= {b"first"}
    sub.close()
    server.close()


@pytest.mark.parametrize("address", ["tcp://", "nonsense"])
def test_a_wrong_address_is_an_error_and_leaves_no_socket_open(context: Context, address: str) -> None:
    with pytest.raises(zmq.ZMQError):
        Subscription(context, address, topic="")


def test_a_followed_server_closes_both_of_its_sockets_and_unregisters_them(context: Context) -> None:
    poller = zmq.Poller()
    sub = Subscription(context, "tcp://127.0.0.1:1", topic="")
    replay = sockets.open_socket(context, zmq.DEALER, "tcp://127.0.0.1:1")
    poller.register(sub.socket, zmq.POLLIN)
    poller.register(replay, zmq.POLLIN)
    source = EventSource("m", "1", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    one = Followed(EndpointName("a"), source, Sequence(replays=True), sub, replay)
    one.close(poller)
    assert sub.socket.closed
    assert replay.closed
    assert one.replay is None
    assert poller.sockets == []
    one.close(poller)
