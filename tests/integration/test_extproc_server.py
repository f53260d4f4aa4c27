"""The ext_proc service over a real gRPC channel, on either transport."""

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.base.errors import ConfigError
from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.config.sections import Listen, Tls
from epp.picker.picker import Picker
from epp.protocol.conversation import SERVICE
from epp.protocol.settings import StreamSettings
from epp.transport.server import ExtProcServer
from tests.harness.certificate import make_certificate, replace_file
from tests.harness.data_plane import exchange
from tests.harness.ports import free_ports
from tests.harness.processes import wait_until
from tests.harness.seen import Seen

BODY = json.dumps({"model": "m", "prompt": "hello " * 50}).encode()
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


class BrokenPicker(Picker):
    """Fails in calls in which no real picker fails."""

    def on_response_headers(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")


def picker_of_three(kind: type[Picker] = Picker) -> Picker:
    picker = kind(DEFAULT_POLICY, rng=random.Random(1))
    endpoints = [
        Endpoint(name=EndpointName(f"e{i}"), address=Address(f"10.0.0.{i}", 80)) for i in range(1, 4)
    ]
    picker.news.set_endpoints(endpoints, now=time.monotonic())
    return picker


@dataclass
class ServerRig:
    server: ExtProcServer
    picker: Picker
    seen: Seen
    target: str

    def in_flight(self) -> int:
        return sum(s.in_flight for s in self.picker.fleet.states())

    async def settled(self) -> None:
        await wait_until(lambda: not self.server.streams.live, what="no stream is left")


def never_overloaded(rig: ServerRig) -> None:
    """Let no request be routed unread, however busy this machine is."""
    rig.server.streams.overload.skips = lambda **_: False  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def serving_picker(
    *,
    listen: Listen | None = None,
    settings: StreamSettings | None = None,
    picker: Picker | None = None,
    ready: bool = True,
) -> AsyncIterator[ServerRig]:
    listen = listen or Listen(address="127.0.0.1:0")
    picker = picker or picker_of_three()
    seen = Seen.of(picker)
    server = ExtProcServer(picker, listen=listen, settings=settings or StreamSettings())
    await server.start(ready=ready)
    target = listen.address if listen.address.startswith("unix:") else f"127.0.0.1:{server.port}"
    try:
        yield ServerRig(server, picker, seen, target)
    finally:
        await server.stop()


def headers(mode: int = 2, **more: str) -> Any:
    values = {":path": "/v1/completions", "x-request-id": "r", **more}
    message = ext_proc.ProcessingRequest()
    for key, value in values.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    message.protocol_config.request_body_mode = mode
    return message


def response_headers(status: bytes = b"200") -> Any:
    message = ext_proc.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=status)
    return message


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_probes_without_certificates_have_a_port_of_their_own() -> None:
    (port,) = free_ports(1)
    listen = Listen(address="127.0.0.1:0", health_address=f"127.0.0.1:{port}")
    async with (
        serving_picker(listen=listen) as rig,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        names = ("inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor", "")
        assert [await health_of(channel, name) for name in names] == [SERVING] * 3
        rig.server.health.set_ready(ready=False)
        assert [await health_of(channel, name) for name in names] == [NOT_SERVING] * 3
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await channel.unary_unary(f"/{SERVICE}/Process", bytes, bytes)(b"")


async def test_a_bug_in_the_picker_fails_that_stream_and_releases_its_booking(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        serving_picker(picker=picker_of_three(BrokenPicker)) as rig,
        grpc.aio.insecure_channel(rig.target) as channel,
        exchange(channel) as asked,
    ):
        await asked.send(BODY)
        await asked.call.write(response_headers())
        assert await asked.code() is grpc.StatusCode.UNKNOWN
        await rig.settled()
        assert rig.in_flight() == 0
        assert rig.seen.over[0].decision.outcome == "aborted"
        assert not rig.picker.fleet.failures.marks  # no server is to blame
        assert "a bug" in caplog.text


async def test_a_body_larger_than_grpcs_default_limit_is_taken() -> None:
    big = json.dumps({"model": "m", "prompt": "x" * 9_000_000}).encode()
    async with (
        serving_picker() as rig,
        grpc.aio.insecure_channel(rig.target) as channel,
        exchange(channel) as asked,
    ):
        await asked.send(big)
        assert asked.request.order == ["headers", "body"]


async def test_a_drain_ends_in_time_whatever_is_in_flight() -> None:
    async with (
        serving_picker() as rig,
        grpc.aio.insecure_channel(rig.target) as channel,
        exchange(channel) as stuck,
    ):
        await stuck.send(BODY)
        await rig.server.drain(0.1)
        assert len(rig.server.streams.live) == 1
        await rig.server.stop()
        assert await stuck.code() is not grpc.StatusCode.OK
        await rig.settled()
        assert rig.in_flight() == 0


async def test_every_user_may_write_to_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "epp.sock"
    before = os.umask(0o077)
    try:
        async with serving_picker(listen=Listen(address=f"unix:{path}")):
            assert path.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with serving_picker() as rig:
        with pytest.raises(ConfigError, match=f"cannot listen on {rig.target}: Address already in use"):
            async with serving_picker(listen=Listen(address=rig.target)):
                pass


async def test_a_socket_in_a_folder_that_is_not_there_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the folder {tmp_path}/nowhere does not exist; create it"):
        async with serving_picker(listen=Listen(address=f"unix:{tmp_path}/nowhere/picker.sock")):
            pass


# -- TLS -----------------------------------------------------------------------------------------------------


async def healthy(target: str, credentials: grpc.ChannelCredentials) -> bool:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        try:
            return await asyncio.wait_for(health_of(channel, "readiness"), 60) == SERVING
        except grpc.aio.AioRpcError:
            return False


async def test_certificates_are_read_again_when_they_change(tmp_path: Path) -> None:
    old_cert, old_key = make_certificate(tmp_path, "old")
    new_cert, new_key = make_certificate(tmp_path, "new")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    replace_file(old_cert, cert)
    replace_file(old_key, key)
    trust_old = grpc.ssl_channel_credentials(old_cert.read_bytes())
    trust_new = grpc.ssl_channel_credentials(new_cert.read_bytes())
    listen = Listen(address="127.0.0.1:0", tls=Tls(cert_file=str(cert), key_file=str(key)))
    async with serving_picker(listen=listen) as rig:
        assert await healthy(rig.target, trust_old)
        assert not await healthy(rig.target, trust_new)
        key.unlink()
        assert await healthy(rig.target, trust_old), "half a renewal changes nothing"
        replace_file(new_key, key)
        replace_file(new_cert, cert)
        assert await healthy(rig.target, trust_new)
        assert not await healthy(rig.target, trust_old)


async def test_mutual_tls_lets_in_only_clients_that_the_ca_signed(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    client_cert, client_key = make_certificate(tmp_path, "client")
    tls = Tls(cert_file=str(cert), key_file=str(key), client_ca_file=str(client_cert))
    root = cert.read_bytes()
    async with serving_picker(listen=Listen(address="127.0.0.1:0", tls=tls)) as rig:
        known = grpc.ssl_channel_credentials(root, client_key.read_bytes(), client_cert.read_bytes())
        assert await healthy(rig.target, known)
        assert not await healthy(rig.target, grpc.ssl_channel_credentials(root))
        stranger = grpc.ssl_channel_credentials(root, key.read_bytes(), root)
        assert not await healthy(rig.target, stranger)
