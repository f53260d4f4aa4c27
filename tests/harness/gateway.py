"""The whole gateway on free ports: backends in the test's loop, the picker and Envoy as processes.

`config_in` writes a configuration to a directory. `running_gateway` starts everything with it and the real
picker. `running_bootstrap` starts everything with the fake picker, to test Envoy's side alone.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.settings import Config, load_config
from epp.serve.envoy import files
from tests.harness.backend import Backend, running_backend
from tests.harness.client import Client, OpenReply, http_client
from tests.harness.envoy import EnvoyProcess, bootstrap_document, running_envoy
from tests.harness.fake_picker import FakePicker, running_fake_picker
from tests.harness.model_servers import ModelServer
from tests.harness.ports import free_ports, free_run
from tests.harness.processes import ManagedProcess, managed_process, wait_until
from tests.harness.transport import transport

Edit = Callable[[dict[str, Any]], None]
"""Changes a bootstrap document in place."""


def config_in(directory: Path, *, workers: int = 1, **fields: Any) -> Config:
    """Write `config.yaml` with free ports and paths in `directory`, and read it back.

    `fields` are the file's own fields, merged one level deep: `envoy={"failOpen": False}`.
    """
    listen, envoy_admin = free_ports(2)
    document: dict[str, Any] = {
        "endpointsFile": str(directory / "endpoints.yaml"),
        "workers": workers,
        "listen": {"address": f"unix:{directory}/picker.sock", "transport": transport()},
        "admin": {"address": f"127.0.0.1:{free_run(workers)}"},
        "envoy": {
            "listen": f"127.0.0.1:{listen}",
            "admin": f"127.0.0.1:{envoy_admin}",
            "edsFile": str(directory / "eds.json"),
            "messageTimeoutSeconds": 5,  # a busy machine may take the default, 1 s, for one pick
        },
    }
    for name, value in fields.items():
        document[name] = {**document.get(name, {}), **value} if isinstance(value, Mapping) else value
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_config(path)


def write_endpoints(
    config: Config,
    backends: Iterable[Backend | ModelServer],
    *,
    roles: Mapping[str, str] | None = None,
    rewrites: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the endpoints file by rename, as an operator's tools do. `roles` are by name. `rewrites` are
    other names for models.
    """
    listed = [{"name": b.name, "address": str(b.address)} for b in backends]
    for each in listed:
        if roles and each["name"] in roles:
            each["role"] = roles[each["name"]]
    path = Path(config.endpoints_file)
    temporary = path.with_suffix(".new")
    temporary.write_text(yaml.safe_dump({"endpoints": listed, "rewrites": [*rewrites]}))
    temporary.replace(path)


def write_policy(config: Config, spec: Mapping[str, Any], *, name: str = "test") -> None:
    """Write the policy file by rename."""
    document = {
        "apiVersion": "prefix-gateway.dev/v1alpha1",
        "kind": "PrefixRoutingPolicy",
        "metadata": {"name": name},
        "spec": dict(spec),
    }
    path = Path(config.policy_file)
    temporary = path.with_suffix(".new")
    temporary.write_text(yaml.safe_dump(document))
    temporary.replace(path)


class PickerProcess:
    """`epp serve` as a process, with all its workers. Made by `running_picker`."""

    def __init__(self, process: ManagedProcess, *, config: Config, session: aiohttp.ClientSession) -> None:
        self.process = process
        self._session = session
        first = Address.parse(config.admin.address)
        self.admin_urls = [f"http://{Address(first.host, first.port + n)}" for n in range(config.workers)]
        self._several = config.workers > 1

    def worker_pids(self) -> list[int]:
        """Return the workers' process ids, the oldest first. With a single worker, return the id of the
        process itself.
        """
        return self.process.children() if self._several else [self.process.pid]

    async def ready(self) -> bool:
        """Tell whether every worker is ready."""
        for url in self.admin_urls:
            try:
                async with self._session.get(f"{url}/readyz") as response:
                    if response.status != 200:
                        return False
            except aiohttp.ClientConnectionError:
                return False
        return True

    async def decision(self, request_id: str) -> dict[str, Any] | None:
        """Return the decision about a request, from the worker that made it."""
        for url in self.admin_urls:
            async with self._session.get(f"{url}/decisions/{request_id}") as response:
                if response.status == 200:
                    document: dict[str, Any] = await response.json()
                    return document
        return None

    async def metrics(self) -> str:
        """Return the metrics pages of all workers, one after the other."""
        return "\n".join(await self._pages())

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels, over all workers."""
        return _total(await self.metrics(), name, **labels)

    async def wait_metric(self, name: str, *, at_least: float, **labels: str) -> None:
        async def reached() -> bool:
            return await self.metric(name, **labels) >= at_least

        await wait_until(reached, what=f"{name} {labels} >= {at_least:g}")

    async def wait_metric_is(self, name: str, value: float, **labels: str) -> None:
        async def equal() -> bool:
            return await self.metric(name, **labels) == value

        await wait_until(equal, what=f"{name} {labels} == {value:g}")

    async def page(self, name: str) -> dict[str, Any]:
        """Return a page of the first worker's admin address."""
        async with self._session.get(f"{self.admin_urls[0]}/{name}") as response:
            document: dict[str, Any] = await response.json()
            return document

    async def idle(self) -> None:
        """Wait until no request is booked."""
        await self.wait_metric_is("epp_in_flight", 0)

    async def reads_bodies(self) -> None:
        """Wait until each worker is sure to read the bodies of its next 15 requests.

        On a busy machine every request may be late. After 16 late requests in a row a picker routes late
        requests without reading them, until half a second has passed without a late request
        (docs/picks.md, "When the picker has too much to do"). A pause of more than 0.1 s ends the row.
        A picker measures its event loop every 0.1 s. So the row has ended after two more measurements.
        """
        measured = "epp_loop_lag_seconds_count"
        before = [_total(page, measured) for page in await self._pages()]

        async def calm() -> bool:
            pages = await self._pages()
            return all(
                _total(page, "epp_overload_ratio") == 0 and _total(page, measured) >= count + 2
                for page, count in zip(pages, before, strict=True)
            )

        await wait_until(calm, what="the picker reads every body")

    async def _pages(self) -> list[str]:
        pages = []
        for url in self.admin_urls:
            async with self._session.get(f"{url}/metrics") as response:
                pages.append(await response.text())
        return pages


def _total(page: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels on a metrics page."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(label in series for label in wanted):
            total += float(value)
    return total


@asynccontextmanager
async def starting_picker(
    config: Config, *, directory: Path, name: str = "picker"
) -> AsyncIterator[PickerProcess]:
    """Start the real picker with `config`, which `config_in` wrote to `directory`."""
    args = [sys.executable, "-m", "epp", "serve", "--config", str(directory / "config.yaml")]
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        managed_process(name, args, directory=directory) as process,
    ):
        yield PickerProcess(process, config=config, session=session)


@asynccontextmanager
async def running_picker(
    config: Config, *, directory: Path, name: str = "picker"
) -> AsyncIterator[PickerProcess]:
    """Start the picker, and yield it once it is ready."""
    async with starting_picker(config, directory=directory, name=name) as picker:
        await picker.process.wait_ready(picker.ready)
        yield picker


@asynccontextmanager
async def running_front(
    config: Config, *, directory: Path, servers: Iterable[object], document: dict[str, Any] | None = None
) -> AsyncIterator[tuple[PickerProcess, EnvoyProcess, Client]]:
    """Run the picker and Envoy before servers at these addresses, which the endpoints file lists."""
    async with running_picker(config, directory=directory) as picker:
        await wait_until(Path(config.envoy.eds_file).exists, what="the picker writes the endpoints file")
        async with running_envoy(config, directory=directory, document=document) as envoy:
            await envoy.wait_endpoints({str(address) for address in servers})
            async with http_client(envoy.url) as client:
                yield picker, envoy, client


@dataclass(slots=True)
class Gateway:
    """Backends, the real picker and Envoy, ready for requests."""

    config: Config
    directory: Path
    backends: list[Backend]
    picker: PickerProcess
    envoy: EnvoyProcess
    client: Client

    @property
    def held(self) -> int:
        """Number of answers whose last piece the servers hold back."""
        return sum(b.behaviour.before_last.waiting for b in self.backends)

    async def set_backends(self, backends: Iterable[Backend]) -> None:
        """Rewrite the endpoints file and wait until Envoy has exactly these endpoints."""
        listed = list(backends)
        write_endpoints(self.config, listed)
        await self.envoy.wait_endpoints({str(b.address) for b in listed})


@asynccontextmanager
async def answers_in_flight(gateway: Gateway, count: int) -> AsyncIterator[list[OpenReply]]:
    """Begin so many streamed answers. Their headers and all pieces but the last were sent, and the backends
    hold back the last piece.
    """
    for backend in gateway.backends:
        backend.behaviour.chunks = 3
        backend.behaviour.before_last.shut()
    async with AsyncExitStack() as stack:
        opening = (stack.enter_async_context(gateway.client.stream(f"prompt {n}")) for n in range(count))
        answers = await asyncio.gather(*opening)
        await wait_until(lambda: gateway.held == count, what="all answers are in flight")
        yield answers


@asynccontextmanager
async def running_gateway(
    directory: Path,
    *,
    backends: int = 3,
    workers: int = 1,
    policy: Mapping[str, Any] | None = None,
    edit: Edit | None = None,
    **fields: Any,
) -> AsyncIterator[Gateway]:
    """Run everything, with the real picker. `fields` go to `config_in`. `edit` changes Envoy's bootstrap."""
    if policy is not None:
        fields["policyFile"] = str(directory / "policy.yaml")
    config = config_in(directory, workers=workers, **fields)
    if policy is not None:
        write_policy(config, policy)
    document = bootstrap_document(config)
    if edit:
        edit(document)
    async with AsyncExitStack() as stack:
        listed = [await stack.enter_async_context(running_backend(f"s{n}")) for n in range(backends)]
        write_endpoints(config, listed)
        front = running_front(
            config, directory=directory, servers=[b.address for b in listed], document=document
        )
        yield Gateway(config, directory, listed, *await stack.enter_async_context(front))


@dataclass(slots=True)
class EnvoyBench:
    """Envoy between backends and a fake picker."""

    config: Config
    backends: list[Backend]
    pickers: list[FakePicker]
    envoy: EnvoyProcess
    client: Client

    @property
    def picker(self) -> FakePicker:
        return self.pickers[0]

    async def set_endpoints(self, addresses: Iterable[Address]) -> None:
        """Write the file that Envoy watches, and wait until Envoy has exactly these endpoints."""
        listed = list(addresses)
        write_eds(self.config.envoy.eds_file, listed)
        await self.envoy.wait_endpoints({str(address) for address in listed})


def write_eds(path: str | Path, addresses: Iterable[Address]) -> None:
    """Write the file from which Envoy reads the endpoints."""
    endpoints = [Endpoint(name=EndpointName(str(address)), address=address) for address in addresses]
    files.write_if_changed(Path(path), files.render_endpoints(endpoints))


@asynccontextmanager
async def running_bootstrap(
    directory: Path,
    *,
    backends: int = 2,
    workers: int = 1,
    extra: Iterable[Address] = (),
    edit: Edit | None = None,
    **fields: Any,
) -> AsyncIterator[EnvoyBench]:
    """Run Envoy with our bootstrap, fake pickers at its workers' addresses, `backends`, and `extra` dead
    endpoints.
    """
    config = config_in(directory, workers=workers, **fields)
    document = bootstrap_document(config)
    if edit:
        edit(document)
    async with AsyncExitStack() as stack:
        listed = [await stack.enter_async_context(running_backend(f"s{n}")) for n in range(backends)]
        pickers = [
            await stack.enter_async_context(running_fake_picker(address))
            for address in config.listen.addresses(workers=workers)
        ]
        write_eds(config.envoy.eds_file, [*(b.address for b in listed), *extra])
        envoy = await stack.enter_async_context(running_envoy(config, directory=directory, document=document))
        client = await stack.enter_async_context(http_client(envoy.url))
        yield EnvoyBench(config, listed, pickers, envoy, client)
