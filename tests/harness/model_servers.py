"""Model servers of this repository as processes, for tests that need real caches. They choose their own
ports.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from epp.base.types import Address
from tests.harness.processes import ManagedProcess, managed_process

MODEL: Final = "made-up"


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A server that is ready."""

    process: ManagedProcess
    address: Address

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@asynccontextmanager
async def running_model_servers(
    directory: Path, *, count: int, flags: Sequence[str] = ()
) -> AsyncIterator[list[ModelServer]]:
    """Run `server-0` and so on. They start together."""
    async with AsyncExitStack() as stack:
        ports = [directory / f"server-{n}.port" for n in range(count)]
        processes = [
            await stack.enter_async_context(
                managed_process(port.stem, _command(port, flags), directory=directory)
            )
            for port in ports
        ]
        servers = []
        for process, port in zip(processes, ports, strict=True):
            await process.wait_ready(port.exists, timeout_s=120)
            servers.append(ModelServer(process, Address("127.0.0.1", int(port.read_text()))))
        yield servers


def _command(port_file: Path, flags: Sequence[str]) -> list[str | Path]:
    where: list[str | Path] = ["--port", "0", "--port-file", port_file, "--model", MODEL]
    return [sys.executable, "-m", "model_server", "serve", *where, *flags]
