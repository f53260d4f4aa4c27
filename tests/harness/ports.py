"""Free ports, for processes that cannot choose one themselves and report it."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

# Below the range from which the kernel takes ports for outgoing connections:
# a free port in that range could be taken a moment later.
_FIRST: Final = 12_000
_LAST: Final = 31_000


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """`count` different free ports."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            port = random.SystemRandom().randint(
                _FIRST, _LAST
            )  # not the seeded generator: parallel runs must differ
            try:
                probe.bind((host, port))
            except OSError:
                continue
            ports.append(port)
    return ports


def free_port(*, host: str = "127.0.0.1") -> int:
    return free_ports(1, host=host)[0]


def free_run(count: int, *, host: str = "127.0.0.1") -> int:
    """The first of `count` neighbouring free ports, for workers that count up from one."""
    while True:
        first = free_port(host=host)
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    probe = held.enter_context(
                        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                    )
                    probe.bind((host, port))
            except OSError:
                continue
            return first
