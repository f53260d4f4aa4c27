"""The line of new calls that are not served yet."""

from __future__ import annotations

import random

from epp.http2.beginnings import Beginnings
from epp.http2.call_events import HalfClosed, Message


def sends(line: Beginnings, number: int, text: bytes, *, came_after: float) -> bool:
    """Send one message. Return whether it waits."""
    if number not in line.calls:
        return False
    line.add(Message(number, text), came_after=came_after)
    return True


def test_a_new_call_waits_with_all_its_messages_until_it_is_taken() -> None:
    line = Beginnings()
    line.calls.add(1)
    assert not line
    line.add(Message(1, b"a"), came_after=5.0)
    line.add(Message(1, b"b"), came_after=6.0)
    line.add(HalfClosed(1), came_after=7.0)
    taken = [line.take() for _ in range(3)]
    assert taken == [(5.0, Message(1, b"a")), (6.0, Message(1, b"b")), (7.0, HalfClosed(1))]
    assert not line
    assert not line.calls, "later messages of the call do not wait"
    assert line.held_bytes == 0


def test_the_call_that_has_waited_longest_is_first_and_its_messages_keep_their_order() -> None:
    line = Beginnings()
    for number in (3, 5):
        line.calls.add(number)
        assert sends(line, number, b"first", came_after=1.0)
    assert sends(line, 3, b"second", came_after=1.0)
    assert line.take()[1] == Message(3, b"first")
    assert sends(line, 3, b"third", came_after=2.0)
    assert [line.take()[1] for _ in range(3)] == [
        Message(3, b"second"),
        Message(3, b"third"),
        Message(5, b"first"),
    ]


def test_a_call_that_is_gone_leaves_nothing() -> None:
    line = Beginnings()
    line.calls.update((1, 3))
    assert sends(line, 1, bytes(1000), came_after=1.0)
    assert line.held_bytes > 1000
    line.gone(1)
    line.gone(3)
    assert not line
    assert line.held_bytes == 0
    assert not line.calls


def test_random_calls_keep_their_order_and_their_bytes() -> None:
    rng = random.Random(1)
    line = Beginnings()
    sent: dict[int, list[bytes]] = {}
    for step in range(5000):
        choice = rng.random()
        if choice < 0.3:
            line.calls.add(step)
            sent[step] = []
        elif choice < 0.7 and sent:
            number, text = rng.choice(list(sent)), b"%d" % step
            if sends(line, number, text, came_after=float(step)):
                sent[number].append(text)
            else:
                assert not sent[number]
        elif choice < 0.9 and line:
            _, event = line.take()
            assert isinstance(event, Message)
            assert sent[event.stream_id].pop(0) == event.data
        elif sent:
            number = rng.choice(list(sent))
            line.gone(number)
            del sent[number]
        line.check_integrity()
