"""Talks to the picker under test as one gateway does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.config.dialects import DIALECTS, DialectName
from epp.tools.conformance import dataplane
from epp.tools.conformance.dataplane import BARE, BUFFERED, DUPLEX, Mode, StreamExchange

MODES: Final[Mapping[DialectName, Mode]] = {
    "envoy": BUFFERED,
    "envoy-gateway": BUFFERED,
    "istio": DUPLEX,
    "ai-gateway": DUPLEX,
    "agentgateway": DUPLEX,
    "nginx": BARE,
    "gke": DUPLEX,
}
"""The body modes of each gateway."""

SENDS_SUBSETS: Final[frozenset[DialectName]] = frozenset(("envoy", "envoy-gateway", "gke"))
_PATIENCE_S: Final = 15.0


@dataclass(slots=True)
class PickerUnderTest:
    """The picker under test. `endpoints` are the `ip:port` of all endpoints that the picker may choose from,
    ready and idle.
    """

    channel: grpc.aio.Channel
    dialect: DialectName
    endpoints: Sequence[str]
    model: str = "m"
    """The model that the requests name."""
    knows_models: bool = False
    """True if the picker knows the models of every endpoint, with `model` among them."""
    alias: tuple[str, str] | None = None
    """A name that the picker replaces, and the new name."""
    prefillers: Sequence[str] = ()
    """The `ip:port` of endpoints that compute prompts for others."""

    @property
    def mode(self) -> Mode:
        return MODES[self.dialect]

    @property
    def reads_list(self) -> bool:
        return DIALECTS[self.dialect].reads_list

    async def route(self, body: Any, *, answered: bool = True, **request: Any) -> StreamExchange:
        """Send one request from start to end. The picked endpoint answers it with 200. Raise AssertionError
        if no gateway could use the pick.
        """
        async with dataplane.exchange(self.channel, mode=self.mode) as exchange:
            await exchange.send(body, **request)
            if exchange.immediate is None and answered and not self.mode.bare:
                await exchange.respond(b'{"choices": []}' if self.mode.response else None)
                status = await exchange.finish()
                assert status is grpc.StatusCode.OK, f"the stream ended with {status}"
            return exchange

    async def health(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=_PATIENCE_S)
        return int(answer.status)
