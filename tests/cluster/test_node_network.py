"""The network of the stand-in node."""

import fcntl
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tests.harness.kubelet.namespaces import NetworkNamespace, link, make_bridge, unlink

pytestmark = pytest.mark.cluster

_GET_HARDWARE_ADDRESS = 0x8927


@pytest.fixture
def namespaces() -> Iterator[list[NetworkNamespace]]:
    with ExitStack() as ends:
        yield [ends.enter_context(closing(NetworkNamespace())) for _ in range(9)]


def test_the_bridge_keeps_its_address_while_pods_come_and_go(namespaces: list[NetworkNamespace]) -> None:
    (node, *pods), addresses = namespaces, [f"10.244.1.{number}" for number in range(8)]
    make_bridge(node, "pods", address="10.244.0.1")

    def hardware() -> str:
        with node.socket() as asking:
            answer = fcntl.ioctl(asking, _GET_HARDWARE_ADDRESS, struct.pack("256s", b"pods"))
        return answer[18:24].hex(":")

    seen = [hardware()]
    for pod, address in zip(pods, addresses, strict=True):
        link(node, pod, address=address, bridge="pods")
        seen.append(hardware())
    for address in addresses:
        unlink(node, address)
        seen.append(hardware())
    assert {*seen} == {"02:00:0a:f4:00:01"}
