"""A fleet for tests of flow control: servers compute tokens at a steady rate, and one server may hold a
part of a prompt.
"""

from dataclasses import dataclass
from math import inf

from epp.base.errors import FlowRefusedError
from epp.config.flow import Flow
from epp.picker.flow.control import Decided, FlowControl, Forecast
from epp.picker.flow.queues import QueueItem

RATE = 1000.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt: its tokens, and the server that holds all but a tenth of them. -1: no server holds them."""

    tokens: int
    home: int = -1


SECOND = Ask(1000)
"""A prompt that keeps a server busy for a second."""


class AFleet:
    """Implements `Forecaster`. `take` sends one to the server of the forecast. Answers have no tokens."""

    def __init__(self, num_servers: int) -> None:
        self.busy_until = [0.0] * num_servers
        self.asked = 0

    def least_wait_s(self, *, now: float) -> float:
        return min((max(0.0, until - now) for until in self.busy_until), default=0.0)

    def forecast(self, payload: Ask, *, left_s: float = inf, now: float) -> Forecast:
        self.asked += 1
        if not self.busy_until:
            return Forecast(0.0, 0.0, payload.tokens, 0.0)
        server = self._best(payload, now=now)
        tokens = self._tokens(payload, server)
        wait_s = max(0.0, self.busy_until[server] - now)
        return Forecast(wait_s, tokens / RATE, tokens, 0.0)

    def take(self, payload: Ask, *, now: float) -> None:
        """Book the request."""
        if self.busy_until:
            server = self._best(payload, now=now)
            self.busy_until[server] = max(now, self.busy_until[server]) + self._tokens(payload, server) / RATE

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

    def __init__(self, settings: Flow, fleet: AFleet) -> None:
        self.flow: FlowControl[Ask] = FlowControl(settings, fleet)
        self.fleet = fleet
        self.left_s = settings.deadline_seconds or inf
        self.let_go: list[QueueItem[Ask]] = []
        self.refused: list[tuple[QueueItem[Ask], FlowRefusedError]] = []

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
        """Return the item of the request, whether the request goes, waits or is refused."""
        forecast = self.fleet.forecast(ask, now=now)
        item = an_item(ask=ask, priority=priority, tenant=tenant)
        try:
            fate = self.flow.offer(
                ask,
                forecast,
                priority=priority,
                tenant=tenant,
                size_bytes=size_bytes,
                left_s=self.left_s if ttft_s is None else ttft_s,
                longest_s=inf,
                now=now,
            )
        except FlowRefusedError as error:
            self.carry_out((item, error), now=now)
            return item
        if isinstance(fate, QueueItem):
            return fate
        item.priority, item.tenant = fate.band.priority, fate.tenant
        self.carry_out((item, forecast), now=now)
        return item

    def pump(self, *, now: float) -> int:
        """Carry out all decisions of this moment. Return how many there were."""
        decided = 0
        while (one := self.flow.next(now=now)) is not None:
            self.carry_out(one, now=now)
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

    def carry_out(self, decided: Decided[Ask], *, now: float) -> None:
        item, outcome = decided
        if isinstance(outcome, FlowRefusedError):
            self.refused.append((item, outcome))
        else:
            self.fleet.take(item.payload, now=now)
            self.let_go.append(item)


def gateway(settings: Flow | None = None, *, num_servers: int = 1) -> FlowGateway:
    return FlowGateway(settings or Flow(), AFleet(num_servers))


def an_item(
    number: int = 0,
    *,
    ask: Ask = SECOND,
    priority: int = 0,
    tenant: str = "",
    expires_at: float = inf,
) -> QueueItem[Ask]:
    """Return the item of a request that came at time 0."""
    return QueueItem(
        payload=ask,
        place=0.0,
        number=number,
        priority=priority,
        tenant=tenant,
        size_bytes=0,
        tokens=1,
        arrived_at=0.0,
        deadline=inf,
        expires_at=expires_at,
    )


def reasons(gate: FlowGateway) -> list[str]:
    return [refusal.reason.removeprefix("flow_") for _, refusal in gate.refused]
