"""A fleet for tests of flow control: servers compute tokens at a steady rate, and one server may hold a
part of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from epp.flow.control import FlowControl
from epp.flow.flow_settings import FlowSettings
from epp.flow.request import Forecast, LetGo, Pool, QueueItem, Refused, Verdict

RATE = 1000.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt: its tokens, and the server that holds all but a tenth of them. -1: no server holds them."""

    tokens: int
    home: int = -1


SECOND = Ask(1000)
"""A prompt that keeps a server busy for a second."""


class AFleet:
    """Implements `Forecaster`. `take` sends a request to the server of the forecast."""

    def __init__(self, num_servers: int) -> None:
        self.busy_until = [0.0] * num_servers
        self.asked = 0

    def least_wait_s(self, *, now: float) -> float:
        return min((max(0.0, until - now) for until in self.busy_until), default=0.0)

    def pool(self, *, now: float) -> Pool:
        busy_s = sum(max(0.0, until - now) for until in self.busy_until)
        count = len(self.busy_until)
        return Pool(count, busy_s / max(1, count), RATE * max(1, count))

    def forecast(self, payload: Ask, *, now: float) -> Forecast:
        self.asked += 1
        if not self.busy_until:
            return Forecast(0.0, 0.0, 0.0, payload.tokens)
        server = self._best(payload, now=now)
        tokens = self._tokens(payload, server)
        wait_s = max(0.0, self.busy_until[server] - now)
        return Forecast(wait_s, wait_s + tokens / RATE, tokens / RATE, tokens)

    def take(self, payload: Ask, *, now: float) -> int:
        """Book the request. Return the tokens that it costs there."""
        if not self.busy_until:
            return 0
        server = self._best(payload, now=now)
        tokens = self._tokens(payload, server)
        self.busy_until[server] = max(now, self.busy_until[server]) + tokens / RATE
        return tokens

    def _best(self, payload: Ask, *, now: float) -> int:
        return min(
            range(len(self.busy_until)),
            key=lambda s: max(0.0, self.busy_until[s] - now) + self._tokens(payload, s) / RATE,
        )

    @staticmethod
    def _tokens(payload: Ask, server: int) -> int:
        return max(1, payload.tokens // 10) if server == payload.home else payload.tokens


class FlowGateway:
    """Flow control in front of that fleet, used as the transport uses it."""

    def __init__(self, flow: FlowControl[Ask], fleet: AFleet) -> None:
        self.flow = flow
        self.fleet = fleet
        self.let_go: list[QueueItem[Ask]] = []
        self.refused: list[Refused[Ask]] = []

    def offer(
        self,
        ask: Ask,
        *,
        now: float,
        priority: int = 0,
        tenant: str = "",
        size_bytes: int = 0,
        ttft_s: float | None = None,
    ) -> QueueItem[Ask]:
        item, verdict = self.flow.offer(
            ask,
            self.fleet.forecast(ask, now=now),
            priority=priority,
            tenant=tenant,
            size_bytes=size_bytes,
            ttft_s=ttft_s,
            longest_s=inf,
            now=now,
        )
        self.carry_out(verdict, now=now)
        return item

    def pump(self, *, now: float) -> int:
        """Carry out all decisions of this moment. Return how many there were."""
        decided = 0
        while (verdict := self.flow.next(now=now)) is not None:
            self.carry_out(verdict, now=now)
            decided += 1
        return decided

    def run(self, *, now: float, until: float) -> float:
        """Call flow control whenever it asks to be woken. Return the time at the end."""
        while True:
            self.pump(now=now)
            if self.flow.due_at > until:
                return until
            assert self.flow.due_at > now, "flow control asks to be woken in the past"
            now = self.flow.due_at

    def carry_out(self, verdict: Verdict[Ask] | None, *, now: float) -> None:
        if isinstance(verdict, LetGo):
            self.fleet.take(verdict.item.payload, now=now)
            self.let_go.append(verdict.item)
        elif verdict is not None:
            self.refused.append(verdict)


def gateway(settings: FlowSettings | None = None, *, num_servers: int = 1) -> FlowGateway:
    fleet = AFleet(num_servers)
    return FlowGateway(FlowControl(settings or FlowSettings(), fleet), fleet)


def learning(*, num_servers: int = 1, **settings: Any) -> FlowGateway:
    """Return a gateway whose policy sets no headroom."""
    return gateway(FlowSettings(headroom_s=None, **settings), num_servers=num_servers)


def passes(
    gate: FlowGateway, *, now: float, tenant: str = "t", ttft_s: float | None = None
) -> tuple[int, str] | None:
    """Return the priority and the tenant that are charged for a new request that need not wait. The request
    has priority 3 and the prompt `SECOND`.
    """
    forecast = gate.fleet.forecast(SECOND, now=now)
    flow = gate.flow.passes(forecast, priority=3, tenant=tenant, ttft_s=ttft_s, now=now)
    return None if flow is None else (flow.band.priority, flow.tenant)


def an_item(number: int = 0, *, deadline: float = inf, expires_at: float = inf) -> QueueItem[Ask]:
    """Return the item of a request that came at time 0."""
    return QueueItem(
        SECOND,
        number=number,
        priority=0,
        tenant="",
        size_bytes=0,
        tokens=1,
        arrived_at=0.0,
        deadline=deadline,
        expires_at=expires_at,
    )


def reasons(gate: FlowGateway) -> list[str]:
    return [refused.reason for refused in gate.refused]
