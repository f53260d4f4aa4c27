"""The picker under test: its address, the options that are on, and, for our own picker, the switches that
some rows need. For a picker that the run did not start, a row may use only `PickerUnderTest`. `OwnPicker`
adds the pages of our admin address and the files that steer the picker.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.config.settings import Config
from epp.tools.conformance import dataplane
from epp.tools.conformance.dataplane import BUFFERED, Exchange, Mode
from tests.harness.backend import Backend, running_backend
from tests.harness.gateway import PickerProcess, config_in, running_picker, write_endpoints, write_policy
from tests.harness.ports import free_port
from tests.harness.processes import wait_until

BODY: Final = b'{"model": "m", "prompt": "hello"}'
"""An ordinary completion request."""

UNMARKED: Mapping[str, Any] = {"costSeconds": 0, "maxLeftOutShare": 0, "hangSeconds": 0}
"""Settings of `failures` with which a server's failures in one test do not matter in the next."""
CALM: Mapping[str, Any] = {
    "sampling": {"share": 0},
    "scrape": {"failuresToEject": 100},
    "failures": UNMARKED,
}
"""A policy under which the picker does nothing by itself. It samples no answers, and it drops no endpoint
while the test's loop is busy elsewhere.
"""
ALIAS: Final = "gpt"
"""The name that `picker_of_models` replaces by `m`."""
_APART: Mapping[str, Any] = {
    **CALM,
    "cost": {"stalledRequestWeight": 5},
    "disaggregation": {"minUncachedTokens": 64},
}


def completion(prompt: str = "hello", *, model: str = "m") -> bytes:
    """Return the body of a completion request."""
    return json.dumps({"model": model, "prompt": prompt}).encode()


async def _at_once() -> None:
    """Do not wait: this run cannot see whether the picker is late."""


@dataclass(slots=True)
class PickerUnderTest:
    """A picker by its address. `endpoints` are the `ip:port` from which it may choose. All of
    them are ready.
    """

    channel: grpc.aio.Channel
    endpoints: Sequence[str]
    has: frozenset[str] = frozenset()
    """The optional features that are on: `conformance-headers`, `scores`."""
    pace: Callable[[], Awaitable[None]] = _at_once
    """Called before each exchange."""

    @asynccontextmanager
    async def exchange(self, mode: Mode = BUFFERED) -> AsyncIterator[Exchange]:
        await self.pace()
        async with dataplane.exchange(self.channel, mode=mode) as exchange:
            yield exchange

    async def route(self, mode: Mode = BUFFERED, body: Any = BODY, **request: Any) -> Exchange:
        """Route one request from start to end. The picked server answers 200."""
        async with self.exchange(mode) as exchange:
            await exchange.send(body, **request)
            if exchange.immediate is None:
                await exchange.respond(b'{"choices": []}' if mode.response else None)
                assert await exchange.finish() is grpc.StatusCode.OK
            return exchange

    async def health(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=60)
        return int(answer.status)

    def needs(self, feature: str, *, on: bool = True) -> None:
        """Skip with a message if the picker was started without these features."""
        if (feature in self.has) != on:
            pytest.skip(f"needs a picker {'with' if on else 'without'} {feature} (--picker-has)")


@dataclass(slots=True)
class OwnPicker(PickerUnderTest):
    """Our picker as its own process, with model servers that the test scripts."""

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
        """Return a JSON page of the admin address."""
        url = self.running.admin_urls[0] + path
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def endpoint(self, address: str) -> dict[str, Any]:
        """Return what the picker's page says about one endpoint."""
        listed = (await self.admin("/endpoints"))["endpoints"]
        found: dict[str, Any] = next(e for e in listed if e["address"] == address)
        return found

    async def wait_endpoint(self, address: str, **expected: Any) -> None:
        """Wait until the picker's page says this about an endpoint."""

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


class Pace:
    """Waits before every fifteenth exchange, so that our picker reads every body even on a busy machine."""

    def __init__(self, process: PickerProcess) -> None:
        self._process = process
        self._exchanges = 0

    async def __call__(self) -> None:
        if self._exchanges % 15 == 0:
            await self._process.reads_bodies()
        self._exchanges += 1


@asynccontextmanager
async def own_picker(
    directory: Path,
    *,
    backends: Sequence[Backend] | None = None,
    policy: Mapping[str, Any] = CALM,
    **fields: Any,
) -> AsyncIterator[OwnPicker]:
    """Run `epp serve` on a free port, with `backends` or with four model servers, of which one has an IPv6
    address.
    """
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
            pace=Pace(process),
            process=process,
            config=config,
            backends=backends,
            directory=directory,
        )


@asynccontextmanager
async def picker_of_models(directory: Path, **fields: Any) -> AsyncIterator[OwnPicker]:
    """Run our picker with an alias and servers that list one model.
    The last server computes prompts for the others, `endpoints`.
    """
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
