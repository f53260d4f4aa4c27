"""Free ports, for processes that cannot choose one themselves and report it.

A port that is only looked up could be taken by the tests of another process before its server listens. So
each process hands out ports of a part of the range that it has locked for itself, one after the other.
"""

import contextlib
import functools
import itertools
import random
import socket
from collections.abc import Iterator
from typing import Final

_FIRST: Final = 12_000
_PART: Final = 200
_PARTS: Final = 45
# The ports end at 21,000. A node of a Redis cluster also takes the port that is 10,000 higher. Both are below
# the range from which the kernel takes ports for outgoing connections.


@functools.cache
def _own_part() -> Iterator[int]:
    """Return the ports of this process, again and again. The first port of a part is its lock: this process
    stays bound to it, and the kernel frees it when the process ends.
    """
    firsts = [_FIRST + part * _PART for part in range(_PARTS)]
    random.SystemRandom().shuffle(firsts)  # Not the seeded generator: processes begin at different parts.
    for first in firsts:
        lock = _socket("127.0.0.1")
        try:
            lock.bind(("127.0.0.1", first))
        except OSError:
            lock.close()
        else:
            lock.detach()
            return itertools.cycle(range(first + 1, first + _PART))
    raise AssertionError(f"{_PARTS} processes with tests run already")


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """Return `count` different free ports."""
    assert count < _PART, "more ports than one process has"
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            probe, port = held.enter_context(_socket(host)), next(_own_part())
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                ports.append(port)
    return ports


def free_port(*, host: str = "127.0.0.1") -> int:
    return free_ports(1, host=host)[0]


def free_run(count: int, *, host: str = "127.0.0.1") -> int:
    """Return the first of `count` neighbouring free ports, for workers that count up from this port."""
    while True:
        ports = free_ports(count, host=host)
        if ports[-1] - ports[0] == count - 1:
            return ports[0]
