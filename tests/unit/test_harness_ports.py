"""The ports that the harness hands out to tests."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.harness.ports import free_port, free_ports, free_run

OTHER_PROCESS = "from tests.harness.ports import free_ports; print(*free_ports(100)); input()"


def test_two_processes_never_hand_out_the_same_port() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = {free_port() for _ in range(100)}
        other.communicate("\n")
    assert len(theirs) == 100
    assert not theirs & ours


def test_a_port_in_use_is_not_handed_out() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        assert taken.getsockname()[1] not in {free_port() for _ in range(400)}


def test_a_run_of_ports_has_no_gap() -> None:
    first, *_ = free_ports(1)
    with socket.create_server(("127.0.0.1", first + 2)):  # the next run would begin at first + 1
        run = free_run(3)
    assert first + 2 not in range(run, run + 3)
