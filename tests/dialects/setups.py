"""One gateway with its picker and three model servers, started once for all tests of its dialect."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from epp.config.settings import Config
from tests.dialects.scripted import AgentGateway, NginxGatewayFabric, running_scripted
from tests.dialects.shapes import Shape
from tests.harness.backend import Backend, running_backend
from tests.harness.client import Client, http_client
from tests.harness.envoy import bootstrap_document, running_envoy
from tests.harness.gateway import (
    PickerProcess,
    config_in,
    running_picker,
    write_eds,
    write_endpoints,
    write_policy,
)
from tests.harness.processes import wait_until

CALM: Final[Mapping[str, Any]] = {
    "sampling": {"share": 0},
    "scrape": {"intervalSeconds": 0.2, "idleIntervalSeconds": 0.2, "failuresToEject": 15},
    "failures": {"costSeconds": 0, "maxEjectedShare": 0, "hangSeconds": 0},
}
"""A policy under which nothing that one test does to a server counts against the server in the next test."""
ADAPTER: Final = "m-sql"
ALIAS: Final = "gpt"
REWRITE: Final = {"models": [ALIAS], "targets": [{"model": ADAPTER}]}
"""The name that the endpoints file gives the adapter. Only the third server has the adapter."""
SCRIPTED: Final = {"agentgateway": AgentGateway, "nginx": NginxGatewayFabric}


@dataclass(slots=True)
class Setup:
    shape: Shape
    config: Config
    directory: Path
    backends: list[Backend]
    picker: PickerProcess
    client: Client
    stack: AsyncExitStack

    def backend(self, name: str) -> Backend:
        return next(backend for backend in self.backends if backend.name == name)

    async def restart_picker(self) -> None:
        """Start another picker in place of a killed one, at the same addresses."""
        self.picker = await self.stack.enter_async_context(
            running_picker(self.config, directory=self.directory, name="picker-again")
        )
        await self.served()

    async def served(self) -> None:
        """Wait until the gateway asks the picker again."""

        async def decided() -> bool:
            reply = await self.client.complete("again?", headers={"x-request-id": "again"})
            return reply.status == 200 and await self.picker.decision("again") is not None

        await wait_until(decided, what="the gateway asks the picker", timeout_s=60)
        await self.listed()

    async def listed(self) -> None:
        """Wait until the picker knows the models of every server."""
        await self.picker.wait_metric_is("epp_endpoints_without_model_list", 0)

    async def decision(self, request_id: str, **expected: Any) -> dict[str, Any]:
        """Return the decision about one request, once it has the values in `expected`."""
        found: dict[str, Any] = {}

        async def holds_now() -> bool:
            nonlocal found
            found = await self.picker.decision(request_id) or {}
            return bool(found) and all(found[name] == value for name, value in expected.items())

        try:
            await wait_until(holds_now, what="")
        except AssertionError:
            raise AssertionError(f"decision {request_id}: wanted {expected}, found {found}") from None
        return found

    async def endpoints(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = (await self.picker.page("endpoints"))["endpoints"]
        return listed

    async def until(self, holds: Callable[[list[dict[str, Any]]], bool], *, what: str) -> None:
        """Wait until the picker's page of endpoints says so."""

        async def holds_now() -> bool:
            return holds(await self.endpoints())

        await wait_until(holds_now, what=what)

    async def use(self, backends: Sequence[Backend], *, roles: Mapping[str, str] | None = None) -> None:
        """Put these servers into the picker's endpoints file, with `roles` by name. The gateway knows all
        servers.
        """
        write_endpoints(self.config, backends, roles=roles, rewrites=[REWRITE])
        wanted = {str(b.address) for b in backends}
        await self.until(lambda seen: {e["address"] for e in seen} == wanted, what=f"it holds {wanted}")
        await self.listed()

    async def policy(self, name: str, **more: Any) -> None:
        """Wait until the picker routes by the policy."""
        write_policy(self.config, {**CALM, **more}, name=name)
        await self.picker.wait_metric_is("epp_policy_info", 1, policy=name)

    def ideal_hit_ratio(self, marker: str) -> float:
        """Of the prompts with `marker` in them, return the share that the chosen server had seen, as if its
        cache were endless.
        """
        hit = total = 0
        for backend in self.backends:
            seen: list[str] = []
            for received in backend.prompts:
                if marker.encode() not in received.body:
                    continue
                prompt = json.loads(received.body)["prompt"]
                hit += max((_shared(prompt, other) for other in seen), default=0)
                total += len(prompt)
                seen.append(prompt)
        return hit / total


@asynccontextmanager
async def running_setup(shape: Shape, directory: Path) -> AsyncIterator[Setup]:
    fields: dict[str, Any] = {"envoy": {"edsFile": ""}}
    if shape.duplex:
        fields = {"envoy": {"edsFile": "", "failOpen": False}}
    fields |= {"policyFile": str(directory / "policy.yaml")}
    config = config_in(directory, dialect=shape.name, **fields)
    write_policy(config, CALM)
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(running_backend(f"s{n}")) for n in range(3)]
        for backend in backends:
            backend.models = [{"id": "m"}]
        backends[2].models.append({"id": ADAPTER, "parent": "m"})
        write_endpoints(config, backends, rewrites=[REWRITE])
        picker = await stack.enter_async_context(running_picker(config, directory=directory))
        url = await stack.enter_async_context(_gateway(shape, config, directory, backends))
        client = await stack.enter_async_context(http_client(url))
        setup = Setup(shape, config, directory, backends, picker, client, stack)
        await setup.served()
        yield setup


@asynccontextmanager
async def _gateway(
    shape: Shape, config: Config, directory: Path, backends: Sequence[Backend]
) -> AsyncIterator[str]:
    if shape.edit is None:
        gateway = SCRIPTED[shape.name](config.listen.address, [str(b.address) for b in backends])
        port = int(config.envoy.listen.rpartition(":")[2])
        async with running_scripted(gateway, port=port) as url:
            yield url
        return
    # The gateway knows the servers without the picker, as it would from its control plane.
    file = directory / "eds.json"
    write_eds(file, [b.address for b in backends])
    envoy = msgspec.structs.replace(config.envoy, eds_file=str(file), max_heap_bytes=0)
    as_own = msgspec.structs.replace(config, dialect="auto", envoy=envoy)
    document = bootstrap_document(as_own)
    shape.edit(document)
    async with running_envoy(as_own, directory=directory, document=document) as running:
        yield running.url


def _shared(first: str, second: str) -> int:
    """Return how many characters both texts share at their beginning."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
