"""Starts the processes to measure: model servers, pickers, the floor, and one Envoy with a listener for each
variant.

All variants share one Envoy process, and so its binary, settings and memory. Only the filter differs.
"""

import copy
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from epp.base.types import Address
from epp.config.settings import Config
from tests.harness.envoy import EnvoyProcess, bootstrap_document, cluster, connection_manager, running_envoy
from tests.harness.gateway import config_in, write_policy
from tests.harness.ports import free_port, free_ports
from tests.harness.processes import ManagedProcess, connects, managed_process

Process = Literal[
    "ours",
    "other",
    "few",
    "floor",
    "envoy",
    "upstream",
    "client",
]
VariantName = Literal[
    "direct",
    "envoy",
    "floor",
    "ours",
    "other",
    "few",
    "floor-duplex",
    "ours-duplex",
]

MAX_ENDPOINTS: Final = 1000
_FEW: Final = 4
"""The number of model servers that the pickers other than ours know. Scrapes of more servers would take CPU
from our picker.
"""
_FULL_DUPLEX: Final = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_trailer_mode": "SEND",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way from the client to a model server."""

    name: VariantName
    label: str
    picker: Process | None = None
    """The process that answers Envoy's ext_proc messages. None means that there is no ext_proc."""
    duplex: bool = False


VARIANTS: Final = {
    v.name: v
    for v in (
        Variant("direct", "client to model server"),
        Variant("envoy", "Envoy without ext_proc"),
        Variant("floor", "Envoy, floor", picker="floor"),
        Variant("ours", "Envoy, our picker", picker="ours"),
        Variant("other", "Envoy, the other picker", picker="other"),
        Variant("few", f"Envoy, our picker, {_FEW} endpoints", picker="few"),
        Variant("floor-duplex", "Envoy full duplex, floor echo", picker="floor", duplex=True),
        Variant("ours-duplex", "Envoy full duplex, our picker", picker="ours", duplex=True),
    )
}


@dataclass(slots=True)
class Rig:
    """All running processes. `ports` has the port of each variant."""

    envoy: EnvoyProcess
    pids: dict[Process, int]
    ports: dict[VariantName, int]
    _configs: Mapping[Process, Config]
    _addresses: Sequence[Address]

    async def set_endpoints(self, count: int) -> None:
        """Set how many model servers our picker and Envoy know. The other pickers know only the first few
        servers.
        """
        listed = self._addresses[:count]
        for name, config in self._configs.items():
            _write_endpoints(Path(config.endpoints_file), listed if name == "ours" else listed[:_FEW])
        await self.envoy.wait_endpoints({str(a) for a in listed})

    async def messages(self, variant: Variant) -> int:
        """Return the number of ext_proc messages that Envoy has sent for this variant so far."""
        return await self.envoy.stat(f"http.{variant.name}.ext_proc.stream_msgs_sent")

    async def bypassed(self) -> int:
        """Return the number of requests that bypassed their picker. If this number is not 0, the figures are
        worthless.
        """
        stats = await self.envoy.stats("http.")
        return sum(value for name, value in stats.items() if name.endswith("ext_proc.failure_mode_allowed"))


@asynccontextmanager
async def running_rig(
    directory: Path,
    *,
    endpoints: int,
    other: Path | None = None,
) -> AsyncIterator[Rig]:
    """Run the rig. `other` is a second checkout, whose picker takes part as a variant."""
    port = free_port()
    # All addresses of 127/8 are on this machine, so one port is enough for all of them.
    addresses = [Address(f"127.0.{n // 250}.{n % 250 + 1}", port) for n in range(MAX_ENDPOINTS)]
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(
            managed_process(
                "upstream",
                [sys.executable, "-m", "bench.dataplane.upstream", *map(str, addresses)],
                directory=directory,
            )
        )
        await upstream.wait_ready(lambda: connects(addresses[-1].host, port))
        pickers = _written_pickers(directory, addresses[:endpoints], other=other)
        running: dict[Process, ManagedProcess] = {"upstream": upstream}
        sockets = await _start(
            stack,
            running,
            pickers,
            directory,
            addresses[:endpoints],
            other=other,
        )
        variants = [v for v in VARIANTS.values() if v.picker is None or v.picker in running]
        listeners = dict(zip([v.name for v in variants], free_ports(len(variants)), strict=True))
        document = _document(pickers["ours"], variants, ports=listeners, sockets=sockets)
        envoy = await stack.enter_async_context(
            running_envoy(pickers["ours"], directory=directory, document=document)
        )
        running["envoy"] = envoy.process
        pids: dict[Process, int] = {name: process.pid for name, process in running.items()}
        pids["client"] = os.getpid()
        rig = Rig(
            envoy=envoy,
            pids=pids,
            ports={**listeners, "direct": port},
            _configs=pickers,
            _addresses=addresses,
        )
        await rig.set_endpoints(endpoints)
        yield rig


async def _start(
    stack: AsyncExitStack,
    running: dict[Process, ManagedProcess],
    pickers: Mapping[Process, Config],
    directory: Path,
    addresses: Sequence[Address],
    *,
    other: Path | None,
) -> dict[Process, Path]:
    """Start the pickers and the floor. Return where each listens."""
    for name, config in pickers.items():
        running[name] = await stack.enter_async_context(
            _running_picker(
                config,
                directory=directory / name,
                checkout=other if name == "other" else None,
            )
        )
    sockets = {name: _socket(config) for name, config in pickers.items()}
    sockets["floor"] = directory / "floor.sock"
    running["floor"] = await stack.enter_async_context(
        _floor(sockets["floor"], addresses, directory=directory)
    )
    for name, path in sockets.items():
        await running[name].wait_ready(path.exists)
    return sockets


def _written_pickers(
    directory: Path, addresses: Sequence[Address], *, other: Path | None
) -> dict[Process, Config]:
    """Write the configuration of each picker that takes part."""
    names: list[Process] = ["ours", "few"] if other is None else ["ours", "few", "other"]
    return {name: _written_config(directory / name, addresses) for name in names}


def _written_config(directory: Path, addresses: Iterable[Address]) -> Config:
    directory.mkdir()
    config = config_in(
        directory,
        policyFile=str(directory / "policy.yaml"),
        drainSeconds=0,
        log={"level": "warning"},
    )
    # The scrapes have the same interval with and without requests, so that their cost can be subtracted.
    scrape = {"intervalSeconds": 1, "idleIntervalSeconds": 1}
    write_policy(config, {"sampling": {"share": 0.0}, "scrape": scrape})
    _write_endpoints(Path(config.endpoints_file), addresses)
    return config


def _write_endpoints(path: Path, addresses: Iterable[Address]) -> None:
    listed = [{"name": f"s{n}", "address": str(address)} for n, address in enumerate(addresses)]
    temporary = path.with_suffix(".new")
    temporary.write_text(yaml.safe_dump({"endpoints": listed}))
    temporary.replace(path)


def _socket(config: Config) -> Path:
    return Path(config.listen.address.removeprefix("unix:"))


@asynccontextmanager
async def _running_picker(
    config: Config,
    *,
    directory: Path,
    checkout: Path | None = None,
) -> AsyncIterator[ManagedProcess]:
    """Run `epp serve` of this checkout or of another checkout."""
    args: list[str | Path] = [
        sys.executable,
        "-m",
        "epp",
        "serve",
        "--config",
        directory / "config.yaml",
    ]
    async with managed_process("picker", args, directory=directory, cwd=checkout) as process:
        eds = Path(config.envoy.eds_file)
        await process.wait_ready(lambda: _socket(config).exists() and eds.exists())
        yield process


def _floor(
    socket: Path, addresses: Iterable[Address], *, directory: Path
) -> AbstractAsyncContextManager[ManagedProcess]:
    args = [sys.executable, "-m", "bench.dataplane.floor", f"unix:{socket}", *map(str, addresses)]
    return managed_process("floor", args, directory=directory)


def _document(
    config: Config,
    variants: Iterable[Variant],
    *,
    ports: dict[VariantName, int],
    sockets: dict[Process, Path],
) -> dict[str, Any]:
    """Return our own bootstrap, with one listener for each variant and a picker cluster for each picker."""
    document = bootstrap_document(config)
    resources = document["static_resources"]
    original = copy.deepcopy(cluster(document, "picker"))
    for name, path in sockets.items():
        if name != "ours":
            resources["clusters"].append(_picker_cluster(original, name=name, path=path))
    template = resources["listeners"][0]
    resources["listeners"] = []
    for variant in variants:
        listener = copy.deepcopy(template)
        listener["name"] = variant.name
        listener["address"]["socket_address"]["port_value"] = ports[variant.name]
        manager = connection_manager({"static_resources": {"listeners": [listener]}})
        manager["stat_prefix"] = variant.name
        if variant.picker is None:
            del manager["http_filters"][0]
        else:
            settings = manager["http_filters"][0]["typed_config"]
            picker = "picker" if variant.picker == "ours" else variant.picker
            settings["grpc_service"]["envoy_grpc"]["cluster_name"] = picker
            # Envoy waits long, so that a slow turn shows in the figures and not as a failed picker.
            settings["message_timeout"] = "20s"
            if variant.duplex:
                settings["processing_mode"].update(_FULL_DUPLEX)
        resources["listeners"].append(listener)
    return document


def _picker_cluster(original: dict[str, Any], *, name: str, path: Path) -> dict[str, Any]:
    made = copy.deepcopy(original)
    made["name"] = name
    made["load_assignment"]["cluster_name"] = name
    endpoint = made["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    endpoint["address"] = {"pipe": {"path": str(path)}}
    if name == "floor":
        del made["health_checks"]  # the floor answers no health checks, only ext_proc
    return made
