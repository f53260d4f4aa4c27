"""A picker that follows a real API server over a connection that can be cut, and the faults that can occur
there, each with its repair. The picker is in exact mode. The test plays the only pod, and the KV events of
the pod's server.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import zmq

from epp.sources.kvevents.block_hashes import BlockHasher
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.gateway import PickerProcess
from tests.harness.ports import free_port
from tests.harness.processes import managed_process
from tests.harness.relay import Relay, running_relay
from tests.harness.simulated_pool import (
    Policies,
    Servers,
    SimulatedPool,
    install_policy_crd,
    picker_account,
    running_servers,
    simulated_pool,
)
from tests.harness.site import site_config
from tests.unit.sources.kvevents.a_language import write_language

_POD: Final = "pod-0000"
_HASH_SEED: Final = "of the configuration"
_OTHER_HASH_SEED: Final = "of a server that was set up otherwise"
_TOKENS: Final = list(range(16))


@dataclass(slots=True)
class Events:
    """The KV events of the pod's server. They report the same block again and again, under a name that comes
    from the server's seed.
    """

    socket: zmq.Socket[bytes]
    seed: str = _HASH_SEED
    number: int = 0

    def restart(self, seed: str) -> None:
        self.seed, self.number = seed, 0

    async def run(self) -> None:
        while True:
            stored = {
                "type": "BlockStored",
                "block_hashes": BlockHasher("sha256", seed=self.seed).names(_TOKENS, block_tokens=16),
                "parent_block_hash": None,
                "token_ids": _TOKENS,
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
            payload = msgspec.msgpack.encode([0.0, [stored], 0])
            self.socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
            self.number += 1
            await asyncio.sleep(0.2)


@dataclass(slots=True)
class PickerInCluster:
    """The picker and its cluster. Made by `running_picker_in_cluster`."""

    plane: ControlPlane
    namespace: str
    picker: PickerProcess
    pool: SimulatedPool
    policies: Policies
    servers: Servers
    events: Events
    relay: Relay
    ca_file: Path
    """Where the picker looks for the API server's certificate. It is missing at first, so the picker cannot
    reach the cluster."""

    @property
    def address(self) -> str:
        """Return the address of its metrics page."""
        return self.picker.admin_urls[0].removeprefix("http://")

    async def let_in(self) -> None:
        """Write the certificate. Return when the picker is ready."""
        shutil.copy(self.plane.ca_file, self.ca_file)
        await self.picker.process.wait_ready(self.picker.ready)

    async def break_much(self) -> None:
        """Cause two faults: a refused policy, and a server that names blocks in another way."""
        self.policies.apply("p", sessionHeader="host")
        await self._restart_server(_OTHER_HASH_SEED)

    async def repair(self) -> None:
        self.policies.apply("p", sessionHeader="x-session")
        await self._restart_server(_HASH_SEED)

    async def _restart_server(self, seed: str) -> None:
        self.events.restart(seed)
        await self.pool.restart(_POD, self.servers.host(0))


@asynccontextmanager
async def running_picker_in_cluster(
    plane: ControlPlane, namespace: str, folder: Path
) -> AsyncIterator[PickerInCluster]:
    """Run the picker. It is not ready, because it cannot reach the cluster until `let_in`."""
    install_policy_crd(plane)
    host, _, port = plane.url.removeprefix("https://").rpartition(":")
    ca_file, events_port = folder / "ca.crt", free_port()
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(running_relay(host, int(port)))
        account = _through(relay, picker_account(plane, namespace), ca_file=ca_file, folder=folder)
        servers = await stack.enter_async_context(running_servers(1))
        pool = await stack.enter_async_context(simulated_pool(plane, namespace))
        await pool.create(ports=[servers.port])
        await pool.add({_POD: servers.host(0)})
        events = await stack.enter_async_context(_publishing(f"tcp://{servers.host(0)}:{events_port}"))
        config = site_config(
            folder,
            account,
            exactMode={
                "models": [
                    {"tokenizerFolder": str(write_language(folder / "language")), "hashSeed": _HASH_SEED}
                ],
                "eventsPort": events_port,
                "replayPort": 0,
            },
        )
        args = [sys.executable, "-m", "epp", "serve", "--config", str(folder / "config.yaml")]
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        )
        process = await stack.enter_async_context(managed_process("picker", args, directory=folder))
        picker = PickerProcess(process, config=config, session=session)
        yield PickerInCluster(
            plane, namespace, picker, pool, Policies(plane, pool), servers, events, relay, ca_file
        )


def _through(relay: Relay, account: Path, *, ca_file: Path, folder: Path) -> Path:
    """Return the same account with the address of the relay."""
    document: dict[str, Any] = json.loads(account.read_text())
    document["clusters"][0]["cluster"] = {
        "server": f"https://127.0.0.1:{relay.port}",
        "certificate-authority": str(ca_file),
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(document))
    return path


@asynccontextmanager
async def _publishing(address: str) -> AsyncIterator[Events]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    events = Events(socket)
    task = asyncio.create_task(events.run())
    try:
        yield events
    finally:
        task.cancel()
        socket.close(linger=0)
        context.term()
