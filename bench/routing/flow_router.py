"""The picker with flow control in front, as a simulated fleet's router: requests wait in it, as they would at the gateway."""

from __future__ import annotations

from collections.abc import Iterator

from bench.routing.foresight import Foreseen, Foresight
from bench.routing.picker_router import PickerRouter
from epp.config.policy import Policy
from epp.flow.control import FlowControl
from epp.flow.request import Forecast, Held, LetGo, Verdict
from epp.flow.settings import FlowSettings
from model_server.sim.fleet import WAITS
from model_server.sim.request import SimRequest


class FlowRouter(PickerRouter):
    """One picker, one queue."""

    def __init__(
        self,
        policy: Policy,
        settings: FlowSettings,
        *,
        seed: int,
        adapters: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(policy, seed=seed, adapters=adapters)
        self._foresight = Foresight(self.pickers[0])
        self._flow: FlowControl[_Asked] = FlowControl(settings, self)

    # -- as a router and a gate -------------------------------------------------------------------------------------

    def route(self, request: SimRequest, *, now: float) -> str | None:
        asked = _Asked(request, self._foresight.see(self._pick_request(request)))
        _, verdict = self._flow.offer(
            asked,
            self.forecast(asked, now=now),
            priority=request.priority,
            tenant=request.tenant,
            size_bytes=asked.foreseen.request.body_bytes,
            now=now,
        )
        return WAITS if verdict is None else self._carry_out(verdict, now=now)

    def decided(self, *, now: float) -> Iterator[tuple[int, str | None]]:
        while (verdict := self._flow.next(now=now)) is not None:
            yield verdict.held.payload.request.request_id, self._carry_out(verdict, now=now)

    @property
    def due_s(self) -> float:
        return self._flow.due_at

    def _carry_out(self, verdict: Verdict[_Asked], *, now: float) -> str | None:
        if not isinstance(verdict, LetGo):
            return None
        held: Held[_Asked] = verdict.held
        return self._send(held.payload.request, held.payload.foreseen.request, self.pickers[0], now=now)

    # -- as the forecaster ------------------------------------------------------------------------------------------

    def least_wait_s(self, *, now: float) -> float:
        return self._foresight.least_wait_s(now=now)

    def forecast(self, payload: _Asked, *, now: float) -> Forecast:
        return self._foresight.forecast(payload.foreseen, now=now)


class _Asked:
    """A request as the simulator knows it, and as the picker does."""

    __slots__ = ("foreseen", "request")

    def __init__(self, request: SimRequest, foreseen: Foreseen) -> None:
        self.request = request
        self.foreseen = foreseen
