"""Probes of containers, from the node's side of the network."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import h2.config
import h2.connection
import h2.events

from tests.harness.kubelet.api import JsonObject
from tests.harness.kubelet.namespaces import NetworkNamespace

_SERVING: Final = b"\x08\x01"
"""HealthCheckResponse{status: SERVING} on the wire."""


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


async def _connect(
    target: Target, port: int, *, host: str = "", tls: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = host or target.address
    sock = target.network.socket()
    try:
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
        context = None
        if tls:  # kubelets do not verify certificates
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return await asyncio.open_connection(sock=sock, ssl=context, server_hostname="" if tls else None)
    except BaseException:
        sock.close()
        raise


async def _http(spec: JsonObject, target: Target) -> bool:
    port = target.port(spec["port"])
    reader, writer = await _connect(
        target, port, host=spec.get("host", ""), tls=spec.get("scheme") == "HTTPS"
    )
    headers = {"Host": f"{target.address}:{port}", "User-Agent": "kube-probe/1.36", "Connection": "close"}
    headers |= {header["name"]: header["value"] for header in spec.get("httpHeaders", [])}
    lines = [
        f"GET {spec.get('path', '/')} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode())
        status = int((await reader.readline()).split()[1])
    finally:
        writer.close()
    return 200 <= status < 400


async def _tcp(spec: JsonObject, target: Target) -> bool:
    _, writer = await _connect(target, target.port(spec["port"]), host=spec.get("host", ""))
    writer.close()
    return True


async def _grpc(spec: JsonObject, target: Target) -> bool:
    """Ask grpc.health.v1.Health/Check by hand, because a gRPC channel cannot be told to use our socket."""
    reader, writer = await _connect(target, spec["port"])
    service = (spec.get("service") or "").encode()
    message = b"\x0a" + bytes([len(service)]) + service if service else b""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.initiate_connection()
    connection.send_headers(
        1,
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/grpc.health.v1.Health/Check"),
            (":authority", target.address),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ],
    )
    connection.send_data(1, b"\0" + len(message).to_bytes(4) + message, end_stream=True)
    answer = bytearray()
    try:
        while True:
            writer.write(connection.data_to_send())
            received = await reader.read(65536)
            if not received:
                return False
            for event in connection.receive_data(received):
                if isinstance(event, h2.events.DataReceived):
                    answer += event.data or b""
                if isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    return bytes(answer[5:]) == _SERVING
    finally:
        writer.close()
