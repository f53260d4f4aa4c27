"""Probes of containers, from the node's side of the network."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.harness import http2_frames
from tests.harness.kubelet.api import JsonObject
from tests.harness.kubelet.namespaces import NetworkNamespace

_SERVING: Final = http2_frames.grpc(b"\x08\x01")
"""The message of a server that is healthy: field 1 is the status SERVING."""


@dataclass(frozen=True, slots=True)
class Target:
    """The container on which a probe or hook acts."""

    network: NetworkNamespace
    """The node's network, since kubelets probe from outside the pod."""
    address: str
    ports: dict[str, int]
    """The container's ports by name."""
    execute: Callable[[Sequence[str]], Awaitable[bool]]
    """Runs a command in the container. Returns whether the command exited with 0."""

    def port(self, value: int | str) -> int:
        return value if isinstance(value, int) else self.ports[value]


async def act(action: JsonObject, target: Target, *, timeout_s: float) -> bool:
    """Run a probe or a hook once. Return False if it failed or took too long."""
    try:
        async with asyncio.timeout(timeout_s):
            if "exec" in action:
                return await target.execute(action["exec"]["command"])
            if "sleep" in action:
                await asyncio.sleep(action["sleep"]["seconds"])
                return True
            if "httpGet" in action:
                return await _http(action["httpGet"], target)
            if "grpc" in action:
                return await _grpc(action["grpc"], target)
            return await _tcp(action["tcpSocket"], target)
    except (TimeoutError, OSError, EOFError, ValueError, IndexError):
        return False


async def _http(spec: JsonObject, target: Target) -> bool:
    port = target.port(spec["port"])
    reader, writer = await target.network.connect(target.address, port)
    lines = [f"GET {spec['path']} HTTP/1.1", f"Host: {target.address}:{port}", "Connection: close"]
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode())
        status = int((await reader.readline()).split()[1])
    finally:
        writer.close()
    return 200 <= status < 400


async def _grpc(spec: JsonObject, target: Target) -> bool:
    """Ask gRPC health by hand, because grpcio makes its own sockets, which are not in the node's network."""
    service = spec.get("service", "").encode()
    reader, writer = await target.network.connect(target.address, spec["port"])
    call = http2_frames.block(replace=[(":path", "/grpc.health.v1.Health/Check")])
    request = http2_frames.grpc(b"\x0a" + bytes([len(service)]) + service)
    heard = b""
    try:
        writer.write(
            http2_frames.hello() + http2_frames.headers(1, call) + http2_frames.data(1, request, ends=True)
        )
        while _SERVING not in heard and (part := await reader.read(4096)):
            heard += part
    finally:
        writer.close()
    return _SERVING in heard


async def _tcp(spec: JsonObject, target: Target) -> bool:
    _, writer = await target.network.connect(target.address, target.port(spec["port"]))
    writer.close()
    return True
