"""Several pickers, each a process with its own configuration, behind one real Envoy that spreads requests
over them.

To Envoy they look like workers: endpoints of the picker's cluster, each with a health check of its own. Among
themselves they are replicas: only Redis connects them, or nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from epp.config.settings import Config
from tests.harness.backend import Backend
from tests.harness.envoy import EnvoyProcess, running_envoy
from tests.harness.gateway import PickerProcess, config_in, running_picker, write_policy
from tests.harness.model_servers import MODEL, ModelServer
from tests.harness.processes import wait_until


@dataclass(slots=True)
class Replicas:
    """The replicas, ready for requests. Made by `running_replicas`."""

    config: Config
    """Envoy's configuration."""
    envoy: EnvoyProcess
    pickers: list[PickerProcess]
    _configs: list[tuple[Config, Path]]
    _stack: AsyncExitStack

    async def kill(self, number: int) -> None:
        """Send SIGKILL to one picker."""
        self.pickers[number].process.kill()
        await self.pickers[number].process.wait()

    async def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all pickers."""
        return sum([await picker.metric(name, **labels) for picker in self.pickers])

    async def wait_met(self, *, timeout_s: float = 120) -> None:
        """Wait until all pickers are connected and hear each other."""
        count = len(self.pickers)

        async def met() -> bool:
            connected = await self.total("epp_sharing_connected")
            return connected == count and await self.total("epp_sharing_peers") == count * (count - 1)

        await wait_until(met, what="the pickers have met", timeout_s=timeout_s)


def write_model_servers(
    path: Path, servers: Iterable[ModelServer | Backend], *, adapters: Sequence[str] = ()
) -> None:
    """Write the model servers as an endpoints file."""
    entries = [
        {"name": s.name, "address": str(s.address), "model": MODEL, "adapters": list(adapters)}
        for s in servers
    ]
    path.write_text(yaml.safe_dump({"endpoints": entries}))


@asynccontextmanager
async def running_replicas(
    directory: Path,
    *,
    servers: Sequence[ModelServer | Backend],
    replicas: int = 1,
    policy: Mapping[str, Any] | None = None,
    sharing: Mapping[str, Any] | None = None,
    adapters: Sequence[str] = (),
) -> AsyncIterator[Replicas]:
    """Run the replicas. `sharing` is this section of each picker's configuration."""
    endpoints, eds = directory / "endpoints.yaml", directory / "eds.json"
    write_model_servers(endpoints, servers, adapters=adapters)
    config = config_in(directory, workers=replicas)
    addresses = config.listen.addresses(workers=replicas)
    sections: dict[str, Any] = {"sharing": sharing} if sharing else {}
    async with AsyncExitStack() as stack:
        pickers, configs = [], []
        for n, address in enumerate(addresses):
            folder = directory / f"picker-{n}"
            folder.mkdir()
            own = config_in(
                folder,
                endpointsFile=str(endpoints),
                policyFile=str(folder / "policy.yaml"),
                listen={"address": address},
                envoy={"edsFile": str(folder / "eds.json") if n else str(eds)},
                **sections,
            )
            write_policy(own, policy or {})
            configs.append((own, folder))
            pickers.append(
                await stack.enter_async_context(running_picker(own, directory=folder, name=f"picker-{n}"))
            )
        await wait_until(eds.exists, what="the picker writes the endpoints file")
        envoy = await stack.enter_async_context(running_envoy(config, directory=directory))
        await envoy.wait_endpoints({str(server.address) for server in servers})
        yield Replicas(config, envoy, pickers, configs, stack)
