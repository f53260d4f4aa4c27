"""The picker under test: where it is, what it knows, and, for our own, the switches that some rows need.

`PickerUnderTest` is all that a row may use of a picker it did not start.
`OwnPicker` adds what our admin address shows and the files that steer it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.config.settings import Config
from epp.conformance import dataplane
from epp.conformance.dataplane import BUFFERED, Exchange, Mode
from tests.harness.backend import Backend, running_backend
from tests.harness.gateway import PickerProcess, config_in, running_picker, write_endpoints, write_policy
from tests.harness.ports import free_port
from tests.harness.processes import wait_until

BODY: Final = b'{"model": "m", "prompt": "hello"}'
"""A completion like any other."""

UNMARKED: Mapping[str, Any] = {"costSeconds": 0, "maxLeftOutShare": 0, "hangSeconds": 0}
"""What one test says of who failed is nothing to the next one."""
CALM: Mapping[str, Any] = {
    "sampling": {"share": 0},
    "scrape": {"failuresToEject": 100},
    "failures": UNMARKED,
}
"""A policy that does nothing unasked: no sampled answers,
no endpoint leaves while the test's loop is busy elsewhere."""
ALIAS: Final = "gpt"
"""What `picker_of_models` replaces by `m`."""
_APART: Mapping[str, Any] = {
    **CALM,
    "cost": {"stalledRequestWeight": 5},
    "disaggregation": {"minUncachedTokens": 64},
}


@dataclass(slots=True)
class PickerUnderTest:
    """A picker by its address. `endpoints` are the `ip:port` it may choose from, all of them ready."""

    channel: grpc.aio.Channel
    endpoints: Sequence[str]
    has: frozenset[str] = frozenset()
    """Optional features that are switched on: `conformance-headers`, `scores`."""

    def exchange(self, mode: Mode = BUFFERED) -> AbstractAsyncContextManager[Exchange]:
        return dataplane.exchange(self.channel, mode=mode)

    async def route(self, mode: Mode = BUFFERED, body: Any = BODY, **request: Any) -> Exchange:
        """One request from start to end, answered with 200 by whoever was picked."""
        async with self.exchange(mode) as exchange:
            await exchange.send(body, **request)
            if exchange.immediate is None:
                await exchange.respond(b'{"choices": []}' if mode.response else None)
                assert await exchange.finish() is grpc.StatusCode.OK
            return exchange

    async def health(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=10)
        return int(answer.status)

    def needs(self, feature: str, *, on: bool = True) -> None:
        """Skip, visibly, what the picker was not started for."""
        if (feature in self.has) != on:
            pytest.skip(f"needs a picker {'with' if on else 'without'} {feature} (--picker-has)")


@dataclass(slots=True)
class OwnPicker(PickerUnderTest):
    """Ours, as a process of its own, with model servers that the test scripts."""

    process: PickerProcess | None = None
    config: Config | None = None
    backends: Sequence[Backend] = ()
    directory: Path = Path()

    @property
    def running(self) -> PickerProcess:
        assert self.process is not None
        return self.process

    @property
    def settings(self) -> Config:
        assert self.config is not None
        return self.config

    async def admin(self, path: str) -> Any:
        """A JSON page of the admin address."""
        url = self.running.admin_urls[0] + path
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def endpoint(self, address: str) -> dict[str, Any]:
        """What the picker knows of one endpoint."""
        listed = (await self.admin("/endpoints"))["endpoints"]
        found: dict[str, Any] = next(e for e in listed if e["address"] == address)
        return found

    async def wait_endpoint(self, address: str, **expected: Any) -> None:
        """Until the picker says so of an endpoint."""

        async def says_so() -> bool:
            known = await self.endpoint(address)
            return all(known[name] == value for name, value in expected.items())

        await wait_until(says_so, what=f"{address} has {expected}")

    async def set_backends(self, backends: Sequence[Backend]) -> None:
        """Rewrite the endpoints file and wait until the picker follows."""
        write_endpoints(self.settings, backends)
        wanted = {str(b.address) for b in backends}

        async def follows() -> bool:
            return {e["address"] for e in (await self.admin("/endpoints"))["endpoints"]} == wanted

        await wait_until(follows, what=f"the picker holds {wanted}")


@asynccontextmanager
async def own_picker(
    directory: Path,
    *,
    backends: Sequence[Backend] | None = None,
    policy: Mapping[str, Any] = CALM,
    **fields: Any,
) -> AsyncIterator[OwnPicker]:
    """`epp serve` on a free port, with four model servers of which one has an IPv6 address,
    or with `backends`."""
    address = f"127.0.0.1:{free_port()}"
    listen = {"address": address, **fields.pop("listen", {})}
    config = config_in(directory, listen=listen, policyFile=str(directory / "policy.yaml"), **fields)
    write_policy(config, policy)
    has = {"conformance-headers"} if config.conformance_headers else set()
    has |= {"scores"} if config.scores_metadata else set()
    async with AsyncExitStack() as stack:
        if backends is None:
            hosts = ("127.0.0.1", "127.0.0.1", "127.0.0.1", "::1")
            backends = [
                await stack.enter_async_context(running_backend(f"s{n}", host=host))
                for n, host in enumerate(hosts)
            ]
        write_endpoints(config, backends)
        process = await stack.enter_async_context(running_picker(config, directory=directory))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield OwnPicker(
            channel=channel,
            endpoints=[str(b.address) for b in backends],
            has=frozenset(has),
            process=process,
            config=config,
            backends=backends,
            directory=directory,
        )


@asynccontextmanager
async def picker_of_models(directory: Path, **fields: Any) -> AsyncIterator[OwnPicker]:
    """Ours, with an alias, and servers that list one model.
    The last of them computes prompts for the others, `endpoints`."""
    async with own_picker(directory, policy=_APART, **fields) as picker:
        *answering, prefiller = picker.backends
        for backend in picker.backends:
            backend.models = [{"id": "m"}]
        alias = {"models": [ALIAS], "targets": [{"model": "m"}]}
        write_endpoints(picker.settings, picker.backends, roles={prefiller.name: "prefill"}, rewrites=[alias])

        async def known() -> bool:
            reply = await picker.route(body=None, method="GET", path="/v1/models")
            listed = reply.immediate is not None and ALIAS.encode() in reply.immediate.body
            return listed and await picker.running.metric("epp_endpoints_without_model_list") == 0

        await wait_until(known, what="every server has listed its models")
        picker.endpoints = [str(b.address) for b in answering]
        yield picker
