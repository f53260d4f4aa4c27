"""The real Envoy as a child process, and what its admin page shows.

Tests wait for states of Envoy (a counter, an endpoint, a healthy picker) and not for time to pass.
"""

import json
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from epp.base.types import Address
from epp.config.settings import Config
from epp.serve.envoy.files import bootstrap
from tests.harness.processes import ManagedProcess, managed_process, wait_until

ENVOY: Final = Path(sysconfig.get_path("scripts")) / "envoy"

EXT_PROC: Final = "http.gateway.ext_proc."
PICKER: Final = "cluster.picker."
MODEL_SERVERS: Final = "cluster.model-servers."


class EnvoyProcess:
    """A running Envoy. Made by `running_envoy`."""

    def __init__(self, process: ManagedProcess, *, config: Config, session: aiohttp.ClientSession) -> None:
        self.process = process
        scheme = "https" if config.envoy.tls else "http"
        self.url = f"{scheme}://{config.envoy.listen}"
        self.admin_url = f"http://{config.envoy.admin}"
        self._session = session

    async def stats(self, prefix: str = "") -> dict[str, int]:
        """Return the counters and gauges whose names begin with this text."""
        document = await self._get_json("/stats", format="json", type="All")
        found: dict[str, int] = {}
        for stat in document["stats"]:
            if stat.get("name", "").startswith(prefix) and isinstance(stat.get("value"), int):
                found[stat["name"]] = stat["value"]
        return found

    async def stat(self, name: str) -> int:
        """Return one counter or gauge by its full name. 0 means that Envoy has not made it yet."""
        return (await self.stats(name)).get(name, 0)

    async def wait_stat(self, name: str, *, at_least: int, timeout_s: float = 60.0) -> None:
        async def reached() -> bool:
            return await self.stat(name) >= at_least

        await wait_until(reached, what=f"{name} >= {at_least}", timeout_s=timeout_s)

    async def wait_stat_is(self, name: str, value: int, *, timeout_s: float = 60.0) -> None:
        async def equal() -> bool:
            return await self.stat(name) == value

        await wait_until(equal, what=f"{name} == {value}", timeout_s=timeout_s)

    async def endpoints(self, cluster: str = "model-servers") -> set[str]:
        """Return the endpoints of a cluster, as `ip:port` or `unix:/path`."""
        document = await self._get_json("/clusters", format="json")
        found: set[str] = set()
        for status in document["cluster_statuses"]:
            for host in status.get("host_statuses", []) if status["name"] == cluster else []:
                address = host["address"]
                if "pipe" in address:
                    found.add(f"unix:{address['pipe']['path']}")
                else:
                    where = address["socket_address"]
                    found.add(str(Address(host=where["address"], port=where["port_value"])))
        return found

    async def wait_endpoints(self, addresses: set[str], *, timeout_s: float = 60.0) -> None:
        async def known() -> bool:
            return await self.endpoints() == addresses

        await wait_until(known, what=f"Envoy holds {sorted(addresses)}", timeout_s=timeout_s)

    async def bypassed(self) -> int:
        """Return the number of requests that went on without the picker."""
        return await self.stat(f"{EXT_PROC}failure_mode_allowed")

    def access_log(self) -> list[dict[str, Any]]:
        """Return the access log so far, one entry for each finished request. Envoy writes an entry some 50 ms
        after the end.
        """
        lines = self.process.stdout.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def _get_json(self, path: str, **query: str) -> dict[str, Any]:
        async with self._session.get(self.admin_url + path, params=query) as response:
            document: dict[str, Any] = await response.json(content_type=None)
            return document


@asynccontextmanager
async def running_envoy(
    config: Config,
    *,
    directory: Path,
    document: dict[str, Any] | None = None,
    concurrency: int = 1,
    wait_healthy_pickers: int | None = None,
) -> AsyncIterator[EnvoyProcess]:
    """Run Envoy with the bootstrap of `config`, or with `document` made from it. Return when it is ready.

    `wait_healthy_pickers` is the number of the picker's workers that must pass their health check first.
    None means all.
    """
    path = directory / "envoy.yaml"
    path.write_text(json.dumps(document) if document is not None else bootstrap(config))
    args: list[str | Path] = [ENVOY, "--config-path", path, "--disable-hot-restart"]
    args += ["--concurrency", str(concurrency), "--log-level", "warning", "--file-flush-interval-msec", "50"]
    workers = config.workers if wait_healthy_pickers is None else wait_healthy_pickers
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        managed_process("envoy", args, directory=directory) as process,
    ):
        envoy = EnvoyProcess(process, config=config, session=session)

        async def ready() -> bool:
            try:
                async with session.get(f"{envoy.admin_url}/ready") as response:
                    if response.status != 200:
                        return False
                return await envoy.stat(f"{PICKER}membership_healthy") >= workers
            except aiohttp.ClientConnectionError:
                return False

        await process.wait_ready(ready)
        yield envoy


def bootstrap_document(config: Config) -> dict[str, Any]:
    """Return the bootstrap as a dictionary, for tests that need a slightly different Envoy."""
    document: dict[str, Any] = yaml.load(bootstrap(config), Loader=yaml.CSafeLoader)
    return document


def connection_manager(document: dict[str, Any]) -> dict[str, Any]:
    """Return the HTTP connection manager inside a bootstrap document."""
    manager: dict[str, Any] = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0][
        "typed_config"
    ]
    return manager


def cluster(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return one cluster inside a bootstrap document."""
    found: dict[str, Any] = next(c for c in document["static_resources"]["clusters"] if c["name"] == name)
    return found
