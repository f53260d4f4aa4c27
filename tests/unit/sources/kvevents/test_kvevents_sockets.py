"""One server's messages over real ZeroMQ: sockets never block, are bounded, and leave nothing behind."""

import itertools
from collections.abc import Iterator

import pytest
import zmq

from epp.sources.kvevents import sockets
from epp.sources.kvevents.sequence import Forget, Step
from epp.sources.kvevents.sockets import MOST_MESSAGE_BYTES, Context, EventSource, Followed, Socket


@pytest.fixture
def context() -> Iterator[Context]:
    made = sockets.new_context()
    yield made
    left_open = [socket for socket in made._sockets if not socket.closed]  # noqa: SLF001
    made.destroy(linger=0)  # term() waits for ever if a socket was left open
    assert left_open == []


class Server:
    """A publisher, and the picker's side that follows it."""

    def __init__(self, context: Context, *, topic: str = "", replay: str = "") -> None:
        self.publisher, self.address = bound(context, zmq.PUB)
        self.gaps = {"found": 0, "lost": 0}
        self.source = EventSource("m", "1", self.address, replay)
        self.followed = Followed(context, self.source, topic=topic, gaps=self.gaps)
        self.numbers = itertools.count()

    def send(self, payload: bytes, *, topic: bytes = b"kv") -> int:
        number = next(self.numbers)
        self.publisher.send_multipart([topic, number.to_bytes(8, "big"), payload])
        return number

    def until_heard(self) -> None:
        """Publish until the subscription has reached the publisher."""
        while not self.followed.read(now=0.0):
            self.send(b"first")
            self.followed.sub.poll(20)

    def close(self) -> None:
        self.publisher.close(linger=0)
        self.followed.close()


def bound(context: Context, kind: int) -> tuple[Socket, str]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    return socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def test_a_subscription_hears_its_topic_and_does_not_wait(context: Context) -> None:
    server = Server(context, topic="kv")
    assert server.followed.read(now=0.0) == []
    server.until_heard()
    server.send(b"other", topic=b"other")
    server.send(b"other", topic=b"kv-of-others")
    server.send(b"last")
    read: list[Step] = []
    while b"last" not in read:
        server.followed.sub.poll(1000)
        read += server.followed.read(now=0.0)
    assert b"other" not in read
    server.close()


@pytest.mark.parametrize("over", [False, True])
def test_an_ended_connection_is_renewed_after_all_its_messages(context: Context, *, over: bool) -> None:
    """A message over the limit ends the connection, and ZeroMQ does not connect again."""
    server = Server(context)
    server.until_heard()
    server.send(bytes(MOST_MESSAGE_BYTES + over))
    if not over:
        while (steps := server.followed.read(now=0.0))[-1:] != [bytes(MOST_MESSAGE_BYTES)]:
            assert set(steps) <= {b"first"}
            server.followed.sub.poll(20)
        server.publisher.close(linger=0)
    before = server.followed.sub
    while server.followed.sub is before:
        assert set(server.followed.read(now=0.0)) <= {b"first"}
        server.followed.renew()
    assert before.closed
    server.close()


@pytest.mark.parametrize("address", ["tcp://", "nonsense"])
def test_a_wrong_address_is_an_error_and_leaves_no_socket_open(context: Context, address: str) -> None:
    with pytest.raises(zmq.ZMQError):
        Followed(context, EventSource("", "", address, ""), topic="", gaps={})


@pytest.mark.parametrize("answered", [True, False])
def test_a_replay_comes_first_and_one_without_an_answer_is_given_up(
    context: Context, *, answered: bool
) -> None:
    router, address = bound(context, zmq.ROUTER)
    server = Server(context, replay=address)
    assert server.followed.read(now=0.0) == []
    if answered:
        client, _, start = router.recv_multipart()
        for number in (int.from_bytes(start, "big"), -1):
            router.send_multipart([client, b"", b"kv", number.to_bytes(8, "big", signed=True), b"replayed"])
        assert server.followed.replay is not None
        read: list[Step] = []
        while server.followed.messages.due is not None:
            read += server.followed.read(now=4.9)
        assert read == [b"replayed"]
    else:
        assert server.followed.read(now=4.9) == []
        assert server.followed.messages.due == 0
        server.followed.read(now=5.0)
        assert server.followed.messages.due is None
    assert server.followed.replay is None
    assert server.followed.restarted() == [Forget.RESTART]
    assert server.followed.messages.due == 0
    router.close(linger=0)
    server.close()


def test_messages_that_wait_for_a_replay_at_a_restart_are_not_read(context: Context) -> None:
    """The old process sent them, and no number of theirs may be taken for one of the new process."""
    router, address = bound(context, zmq.ROUTER)
    server = Server(context, replay=address)
    while not server.followed.sub.poll(20):
        server.send(b"of the old process")
    assert server.followed.restarted() == [Forget.RESTART]
    while server.followed.messages.due is not None:
        assert server.followed.read(now=0.0) == []
        server.followed.messages.replay_over()
    assert server.followed.read(now=0.0) == []
    router.close(linger=0)
    server.close()


def test_a_replay_that_does_not_end_is_given_up(context: Context) -> None:
    router, address = bound(context, zmq.ROUTER)
    server = Server(context, replay=address)
    assert server.followed.read(now=0.0) == []
    client = router.recv_multipart()[0]
    replay = server.followed.replay
    assert replay is not None
    now = 0.0
    while server.followed.replay is not None:
        router.send_multipart([client, b"", b"kv", (0).to_bytes(8, "big"), b"again"])
        replay.poll(1000)
        now += 4.0
        server.followed.read(now=now)
        assert now < 100.0
    server.close()
    router.close(linger=0)
