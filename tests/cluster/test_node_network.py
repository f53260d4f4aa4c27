"""The network of the stand-in node."""

import fcntl
import struct

import pytest

from tests.harness.kubelet.namespaces import NetworkNamespace, link, make_bridge, unlink

pytestmark = pytest.mark.cluster

_GET_HARDWARE_ADDRESS = 0x8927


def test_the_bridge_keeps_its_address_while_pods_come_and_go(request: pytest.FixtureRequest) -> None:
    addresses = [f"10.244.1.{number}" for number in range(8)]
    node, *pods = [NetworkNamespace() for _ in range(1 + len(addresses))]
    for each in (node, *pods):
        request.addfinalizer(each.close)
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
