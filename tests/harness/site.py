"""A picker process in a cluster, with the rights that the chart gives to it. A test plays the pods.

`running_site` starts everything in one namespace, and `Site.replica` starts further replicas.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epp.config.settings import Config
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.gateway import PickerProcess, config_in, running_picker
from tests.harness.processes import wait_until
from tests.harness.simulated_pool import (
    POOL,
    Policies,
    Servers,
    SimulatedPool,
    install_policy_crd,
    picker_account,
    running_servers,
    simulated_pool,
)


@dataclass(slots=True)
class Site:
    """One namespace with a pool, its pods, and a picker."""

    plane: ControlPlane
    namespace: str
    servers: Servers
    pool: SimulatedPool
    policies: Policies
    picker: PickerProcess
    account: Path
    folder: Path

    def hosts(self, count: int, *, start: int = 0) -> dict[str, str]:
        """Return names and addresses of so many pods."""
        return {f"pod-{n:04}": self.servers.host(n) for n in range(start, start + count)}

    async def endpoints(self, picker: PickerProcess | None = None) -> dict[str, dict[str, Any]]:
        """Return the picker's endpoints by name."""
        shown = await (picker or self.picker).page("endpoints")
        return {e["name"]: e for e in shown["endpoints"]}

    async def wait_addresses(self, *addresses: str) -> None:
        """Wait until the picker has endpoints at these addresses and no others."""
        seen: set[str] = set()

        async def found_there() -> bool:
            nonlocal seen
            seen = {e["address"] for e in (await self.endpoints()).values()}
            return seen == set(addresses)

        try:
            await wait_until(found_there, what=f"the picker has endpoints at {addresses}")
        except AssertionError as error:
            raise AssertionError(f"the endpoints are at {seen}, not at {addresses}") from error

    async def wait_policy(self, name: str, *, rule: str = "") -> None:
        """Wait until the picker routes by this policy, and by this rule if one is given."""

        async def routes() -> bool:
            policy = await self.picker.page("policy")
            return bool(policy["metadata"]["name"] == name and rule in ("", policy["spec"]["rule"]))

        await wait_until(routes, what=f"policy {name} routes")

    @asynccontextmanager
    async def replica(self, name: str, **fields: Any) -> AsyncIterator[PickerProcess]:
        """Run one more picker of the same pool."""
        folder = self.folder / name
        folder.mkdir()
        async with running_picker(
            site_config(folder, self.account, **fields), directory=folder, name=name
        ) as picker:
            yield picker


def site_config(
    folder: Path, account: Path, *, kubernetes: Mapping[str, Any] | None = None, **fields: Any
) -> Config:
    """Return the picker's configuration in a cluster."""
    return config_in(
        folder,
        endpointsFile="",
        kubernetes={"pool": POOL, "kubeconfig": str(account), **(kubernetes or {})},
        **fields,
    )


@asynccontextmanager
async def running_site(
    plane: ControlPlane,
    namespace: str,
    folder: Path,
    *,
    servers: int = 8,
    pods: int = 0,
    pool: bool = True,
    **fields: Any,
) -> AsyncIterator[Site]:
    """Run a site. `servers` is a number of addresses for pods. `pods` are Ready from the start.
    `fields` belong to the configuration.
    """
    install_policy_crd(plane)
    account = picker_account(plane, namespace)
    async with running_servers(servers) as running, simulated_pool(plane, namespace) as simulated:
        if pool:
            await simulated.create(ports=[running.port])
        await simulated.add({f"pod-{n:04}": running.host(n) for n in range(pods)})
        config = site_config(folder, account, **fields)
        async with running_picker(config, directory=folder) as picker:
            yield Site(
                plane=plane,
                namespace=namespace,
                servers=running,
                pool=simulated,
                policies=Policies(plane, simulated),
                picker=picker,
                account=account,
                folder=folder,
            )
